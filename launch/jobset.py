"""Renders and checks the Kubernetes manifest of a training run on TPU slices (a JobSet); called by gke.sh.

    python launch/jobset.py --name=fgd --image=IMAGE --workdir=/runs/a -- python -m fgd_jax.train ...

Every slice is a Job of the set with one pod a host; GKE gives the pods the variables by which jax finds the others. Checked
before it is printed: the set against jobset.schema.json, and what Kubernetes itself defines (the Job in it) against the
published schema of its version, if kubernetes-validate is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from typing import Any

SCHEMA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "jobset.schema.json")
KUBERNETES = "1.32"
CANNOT_WORK = 2  # exit status of a run that would fail again
PORTS = (8471, 8080, 8431, 8482)  # TPU processes, slices, metrics, jax's coordinator


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--name", default="fgd", help="of the JobSet")
  parser.add_argument("--namespace", default="default")
  parser.add_argument("--image", required=True, help="container image with fgd-jax[tpu]")
  parser.add_argument("--accelerator", default="tpu-v5-lite-podslice", help="GKE's name of the TPU type")
  parser.add_argument("--topology", default="4x4", help="of a slice")
  parser.add_argument("--chips-per-host", type=int, default=4)
  parser.add_argument("--slices", type=int, default=1)
  parser.add_argument("--restarts", type=int, default=20, help="of the whole set, after preemptions and failures")
  parser.add_argument("--spot", action="store_true")
  parser.add_argument("--bucket", default="", help="Cloud Storage bucket that is mounted (needs --service-account)")
  parser.add_argument("--service-account", default="default")
  parser.add_argument("--claim", default="", help="PersistentVolumeClaim (ReadWriteMany) instead of a bucket")
  parser.add_argument("--mount", default="/runs", help="where it is mounted")
  parser.add_argument("command", nargs="+", help="after --")
  args = parser.parse_args()
  try:
    manifest = render(args)
    check(manifest)
  except ValueError as e:
    sys.exit(f"jobset.py: {e}")
  try:
    import yaml
    print(yaml.safe_dump(manifest, sort_keys=False, width=120), end="")
  except ImportError:  # outside the project's environment; JSON is YAML, too
    print(json.dumps(manifest, indent=2))


def render(args: argparse.Namespace) -> dict[str, Any]:
  """The manifest as a dict.

  Raises:
    ValueError: options that do not fit together.
  """
  if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*){1,2}", args.topology):
    raise ValueError(f"--topology={args.topology} must be chips along each axis, such as 4x4 or 2x2x4.")
  chips = math.prod(int(n) for n in args.topology.split("x"))
  per_host = min(args.chips_per_host, chips)
  if per_host < 1 or chips % per_host:
    raise ValueError(f"--chips-per-host={args.chips_per_host} must divide the {chips} chips of --topology={args.topology}.")
  if args.slices < 1 or args.restarts < 0:
    raise ValueError(f"--slices={args.slices} must be at least 1 and --restarts={args.restarts} at least 0.")
  if bool(args.bucket) == bool(args.claim):
    raise ValueError("Give --bucket=NAME or --claim=NAME: the run's folder must outlive the pods.")
  selector = {"cloud.google.com/gke-tpu-accelerator": args.accelerator, "cloud.google.com/gke-tpu-topology": args.topology}
  if args.spot:
    selector["cloud.google.com/gke-spot"] = "true"
  volume: dict[str, Any] = {"name": "runs"}
  if args.claim:
    volume["persistentVolumeClaim"] = {"claimName": args.claim}
  else:
    options = "implicit-dirs,rename-dir-limit=200000"  # checkpoints are committed by renaming a folder
    volume["csi"] = {"driver": "gcsfuse.csi.storage.gke.io",
                     "volumeAttributes": {"bucketName": args.bucket, "mountOptions": options}}
  pod: dict[str, Any] = {
      "nodeSelector": selector,
      "restartPolicy": "Never",
      "terminationGracePeriodSeconds": 120,  # SIGTERM: the processes save and end
      "serviceAccountName": args.service_account,
      "containers": [{
          "name": "train", "image": args.image,
          "command": [word.replace("$(", "$$(") for word in args.command],  # Kubernetes would expand $(NAME)
          "ports": [{"containerPort": port} for port in PORTS],
          "resources": {"requests": {"google.com/tpu": str(per_host)}, "limits": {"google.com/tpu": str(per_host)}},
          "volumeMounts": [{"name": "runs", "mountPath": args.mount}]}],
      "volumes": [volume]}
  if args.spot:
    pod["tolerations"] = [{"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}]
  template: dict[str, Any] = {"spec": pod}
  if args.bucket:
    template = {"metadata": {"annotations": {"gke-gcsfuse/volumes": "true"}}, **template}
  hosts = chips // per_host
  job = {"parallelism": hosts, "completions": hosts, "completionMode": "Indexed", "backoffLimit": 0, "template": template,
         "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [CANNOT_WORK]}}]}}
  return {
      "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet",
      "metadata": {"name": args.name, "namespace": args.namespace,
                   "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}},
      "spec": {"failurePolicy": {"maxRestarts": args.restarts, "rules": [
                   {"name": "cannot-work", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]},
               "replicatedJobs": [{"name": "slice", "replicas": args.slices, "template": {"spec": job}}]}}


def check(manifest: dict[str, Any]) -> None:
  """Checks against the schemas that can be had here.

  Raises:
    ValueError: the place and the reason of the first contradiction.
  """
  try:
    import jsonschema
  except ImportError:
    print("jobset.py: not checked against its schema; pip install jsonschema kubernetes-validate to have that.",
          file=sys.stderr)
    return
  with open(SCHEMA, encoding="utf-8") as f:
    schema = json.load(f)
  for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest):
    raise ValueError(f"the manifest's {'.'.join(map(str, error.absolute_path))} is wrong: {error.message}")
  try:
    import kubernetes_validate
  except ImportError:
    return
  for replicated in manifest["spec"]["replicatedJobs"]:
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": replicated["name"]}, **replicated["template"]}
    try:
      kubernetes_validate.validate(job, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as e:
      raise ValueError(f"the Job of {replicated['name']!r} is wrong: {e.message}") from e


if __name__ == "__main__":
  main()
