"""Eight virtual CPU devices for the mesh tests; float64 only where a test asks for it."""

import atexit
import json
import os
import shutil
import tempfile

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # the same programs are compiled by many tests, in several processes
  os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="fgd_jax_compiled_")
  atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402  (after the flags)
import pytest  # noqa: E402


@pytest.fixture
def x64():
  """Runs the test with float64 enabled."""
  with jax.enable_x64(True):
    yield


@pytest.fixture
def printed(capsys):
  """A netsim command, run in this process; what it prints as JSON."""
  def run(*words):
    from fgd_jax.netsim.__main__ import main
    main([*words, "--json"])
    return json.loads(capsys.readouterr().out)
  return run
