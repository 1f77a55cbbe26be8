#!/usr/bin/env bash
# A real slow network on this machine: a network namespace for each worker, joined by links of a limited rate. Trains with
# one process in each and prints the measured compute utilisation beside the simulator's. Linux, root, iproute2.
#   sudo bash launch/local_wan.sh [--workers=4] [--rate=10mbit] [--config=FILE[:key=value,...]] [--workdir=DIR]
#
#   --rate=10mbit      of every link, both ways (tc's units)
#   --delay=           one way, such as 20ms: packets then pass a router in user space (good to about 100mbit)
#   --methods=diloco,GlobalM1,GlobalM1LocalM2
#   --rounds=6         of each method, besides the first
#   --timeout=1800     seconds after which everything ends
#   --dry-run          print the commands only
#
# The namespaces are removed however the script ends. The machine's own interfaces are not touched: all addresses
# (10.77.0.0/24) are inside the namespaces. Results: WORKDIR/local_wan.json, WORKDIR/logs.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_options "workers=4 rate=10mbit delay= methods=diloco,GlobalM1,GlobalM1LocalM2 rounds=6 timeout=1800
               config=configs/quickstart.py:inner_steps=20,model.scan_layers=true workdir=runs/local_wan" "$@"
for name in workers rounds timeout; do variable=opt_$name; whole "$name" "${!variable}"; done
if [ "$opt_workers" -lt 2 ] || [ "$opt_workers" -gt 200 ]; then fail "--workers=$opt_workers must be from 2 to 200."; fi
if ! [[ $opt_rate =~ ^[1-9][0-9]*[kmg]bit$ ]]; then fail "--rate=$opt_rate must be such as 10mbit, 500kbit or 1gbit."; fi
if ! [[ $opt_delay =~ ^([0-9]+(\.[0-9]+)?ms)?$ ]]; then fail "--delay=$opt_delay must be such as 20ms."; fi
case "$opt_config" in *:*) config=$opt_config ;; *) config=$opt_config: ;; esac
for option in ${train_options[@]+"${train_options[@]}"}; do config=$config,${option#--config.}; done
if [ -z "$dry_run" ]; then
  for tool in ip tc; do
    if ! command -v "$tool" > /dev/null; then fail "$tool was not found; install iproute2."; fi
  done
  if [ "$(id -u)" != 0 ]; then fail "network namespaces need root; run it with sudo (or in a container with --privileged)."; fi
  if ! { ip netns add fgd-try && ip netns del fgd-try; } 2> /dev/null; then
    fail "this kernel or container allows no network namespaces (CAP_SYS_ADMIN); try a virtual machine or --privileged."
  fi
  if ip netns list | grep -q '^fgdwan'; then
    if [ -n "$(for n in $(ip netns list | grep -o '^fgdwan[a-z0-9]*'); do ip netns pids "$n"; done)" ]; then
      fail "another local_wan is running on this machine; wait for its end."
    fi
  fi
fi
find_python

address() { echo "10.77.0.$(($1 + 1))"; }
hosts() { printf '127.0.0.1 localhost\n%s %s\n' "$(address "$1")" "$(uname -n)"; }

down() {
  local n
  trap '' INT TERM
  if [ -n "${router:-}" ]; then kill "$router" 2> /dev/null || true; wait "$router" 2> /dev/null || true; fi
  if [ -n "$dry_run" ]; then
    for ((n = 0; n < opt_workers; n++)); do run ip netns del "fgdwan$n"; run rm -rf "/etc/netns/fgdwan$n"; done
    if [ -z "$opt_delay" ]; then run ip netns del fgdwanswitch; fi
    return
  fi
  for n in $(ip netns list | grep -o '^fgdwan[a-z0-9]*'); do
    # shellcheck disable=SC2046
    kill -KILL $(ip netns pids "$n") 2> /dev/null || true
    ip netns del "$n" || true
  done
  rm -rf /etc/netns/fgdwan*
}

# gloo binds to what the host name resolves to, and `ip netns exec` mounts this file as /etc/hosts.
name_workers() {
  local n
  for ((n = 0; n < opt_workers; n++)); do hosts "$n" | write "/etc/netns/fgdwan$n/hosts"; done
}

# A switch in a namespace of its own; the kernel's token bucket limits the up-link and the down-link of every worker.
up() {
  local n
  run ip netns add fgdwanswitch
  run ip -n fgdwanswitch link set lo up
  run ip -n fgdwanswitch link add bridge0 type bridge
  run ip -n fgdwanswitch link set bridge0 up
  for ((n = 0; n < opt_workers; n++)); do
    run ip netns add "fgdwan$n"
    run ip -n "fgdwan$n" link set lo up
    run ip link add wan0 netns "fgdwan$n" type veth peer name "port$n" netns fgdwanswitch
    run ip -n "fgdwan$n" addr add "$(address "$n")/24" dev wan0
    run ip -n "fgdwan$n" link set wan0 up
    run ip -n fgdwanswitch link set "port$n" master bridge0
    run ip -n fgdwanswitch link set "port$n" up
    run tc -n "fgdwan$n" qdisc add dev wan0 root tbf rate "$opt_rate" burst 32kb latency 100ms
    run tc -n fgdwanswitch qdisc add dev "port$n" root tbf rate "$opt_rate" burst 32kb latency 100ms
  done
}

# The same with a delay, which the token bucket does not have: TUN devices joined by a router in user space.
up_delayed() {
  local n
  for ((n = 0; n < opt_workers; n++)); do
    run ip netns add "fgdwan$n"
    run ip -n "fgdwan$n" link set lo up
    run ip -n "fgdwan$n" tuntap add dev wan0 mode tun
    run ip -n "fgdwan$n" addr add "$(address "$n")/24" dev wan0
    run ip -n "fgdwan$n" link set wan0 up
  done
  local command=("$python" launch/wan_router.py "--workers=$opt_workers" "--rate=$opt_rate" "--delay=$opt_delay")
  if [ -n "$dry_run" ]; then echo "$(quoted "${command[@]}") &"; return; fi
  "${command[@]}" &
  router=$!
  until ip -n "fgdwan$((opt_workers - 1))" link show wan0 | grep -q LOWER_UP; do
    if ! kill -0 "$router" 2> /dev/null; then fail "the router ended; --delay needs /dev/net/tun."; fi
    sleep 0.1
  done
}

trap 'exit 130' INT
trap 'exit 143' TERM HUP
trap down EXIT
if [ -z "$dry_run" ]; then down; trap 'exit 130' INT; trap 'exit 143' TERM HUP; fi  # what a killed run left
name_workers
if [ -n "$opt_delay" ]; then up_delayed; else up; fi
pids=()
for ((i = 0; i < opt_workers; i++)); do
  start "$opt_workdir/logs/process-$i.log" ip netns exec "fgdwan$i" timeout --kill-after=10 "$opt_timeout" env JAX_PLATFORMS=cpu \
    XLA_FLAGS=--xla_cpu_multi_thread_eigen=false "FGD_COORDINATOR=$(address 0):8476" "FGD_NUM_PROCESSES=$opt_workers" \
    "FGD_PROCESS_ID=$i" "PYTHONPATH=$root" "JAX_COMPILATION_CACHE_DIR=$opt_workdir/compiled" \
    "$python" benchmarks/local_wan.py "--config=$config,workers=$opt_workers" "--workdir=$opt_workdir" \
    "--methods=$opt_methods" "--rate=$opt_rate" "--rounds=$opt_rounds"
done
status=0
wait_for_all || status=$?
if [ "$status" != 0 ]; then echo "$script: process ${failed:-?} ended with status $status; see $opt_workdir/logs." >&2; fi
exit "$status"
