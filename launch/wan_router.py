"""Routes packets between network namespaces with a rate and a delay: what the kernel's netem does, where it is missing.

    python launch/wan_router.py --workers=4 --rate=10mbit --delay=20ms        (root; started by local_wan.sh --delay=...)

Worker i's namespace fgdwan<i> has a TUN device wan0 with the address 10.77.0.<i+1>. A packet waits for its sender's up-link,
then for its receiver's down-link, each of the given rate, and arrives after the delay; queues hold 0.2 s, then packets are
dropped and TCP slows down. One process in Python carries about 100 Mbit/s in all.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import os
import selectors
import struct
import sys
import time

CLONE_NEWNET, TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x40000000, 0x400454CA, 0x0001, 0x1000
QUEUE = 0.2  # seconds
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def attach(names: list[str]) -> list[int]:
  """File descriptors of the TUN device of every namespace."""
  libc = ctypes.CDLL(None, use_errno=True)

  def enter(fd: int) -> None:
    if libc.setns(fd, CLONE_NEWNET):
      raise OSError(ctypes.get_errno(), f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}")

  home, devices = os.open("/proc/self/ns/net", os.O_RDONLY), []
  for name in names:
    there = os.open(f"/run/netns/{name}", os.O_RDONLY)
    enter(there)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"wan0", IFF_TUN | IFF_NO_PI))
    enter(home)
    os.close(there)
    devices.append(device)
  return devices


class Router:
  """Packets in flight between the devices; seconds of time.monotonic().

  Args:
    devices: of the workers, in order.
    bits: a second, of every link.
    delay: one way.
  """

  def __init__(self, devices: list[int], bits: float, delay: float):
    self._devices, self._bits, self._delay = devices, bits, delay
    self._up, self._down = [0.0] * len(devices), [0.0] * len(devices)  # when each link is free
    self._flying: list[tuple[float, int, int, bytes]] = []
    self._count = 0

  def take(self, sender: int, packet: bytes, now: float) -> None:
    """A packet leaves a worker; others' addresses and full queues drop it."""
    if packet[0] >> 4 != 4 or packet[16:19] != bytes((10, 77, 0)) or not 0 < packet[19] <= len(self._devices):
      return
    receiver, length = packet[19] - 1, 8 * len(packet) / self._bits
    sent = max(self._up[sender], now) + length
    # The down-link takes the bits as they come, so an idle one adds nothing.
    arrived = max(self._down[receiver] + length, sent)
    if sent - now > QUEUE or arrived - sent > QUEUE:
      return
    self._up[sender], self._down[receiver] = sent, arrived
    self._count += 1
    heapq.heappush(self._flying, (arrived + self._delay, self._count, receiver, packet))

  def deliver(self, now: float) -> float | None:
    """Hands over what has arrived; seconds until the next arrival, None without any."""
    while self._flying and self._flying[0][0] <= now:
      _, _, receiver, packet = heapq.heappop(self._flying)
      try:
        os.write(self._devices[receiver], packet)
      except OSError:  # the device's own queue is full, or its worker is gone
        pass
    return max(self._flying[0][0] - now, 0.0) if self._flying else None

  def run(self) -> None:
    """For ever."""
    selector = selectors.DefaultSelector()
    for i, device in enumerate(self._devices):
      selector.register(device, selectors.EVENT_READ, i)
    while True:
      for key, _ in selector.select(self.deliver(time.monotonic())):
        for _ in range(64):  # then look at the clock
          try:
            packet = os.read(key.fd, 65536)
          except BlockingIOError:
            break
          self.take(key.data, packet, time.monotonic())


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--workers", type=int, required=True)
  parser.add_argument("--rate", required=True, help="such as 10mbit")
  parser.add_argument("--delay", required=True, help="one way, such as 20ms")
  args = parser.parse_args()
  bits = float(args.rate[:-4]) * UNITS[args.rate[-4:]]
  try:
    devices = attach([f"fgdwan{i}" for i in range(args.workers)])
    Router(devices, bits, float(args.delay.removesuffix("ms")) / 1000).run()
  except OSError as e:
    sys.exit(f"wan_router.py: {e}")
  except KeyboardInterrupt:
    pass


if __name__ == "__main__":
  main()
