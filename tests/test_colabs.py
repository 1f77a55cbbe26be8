"""The notebooks run from top to bottom, at small sizes, and are stored without outputs."""

import glob
import os

import nbclient
import nbformat
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NOTEBOOKS = sorted(glob.glob(os.path.join(ROOT, "colabs", "*.ipynb")))


def test_all_four_are_there():
  assert [os.path.basename(path) for path in NOTEBOOKS] == ["quickstart.ipynb", "topologies.ipynb", "utilization.ipynb",
                                                            "wrap_your_model.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=os.path.basename)
def test_notebook_runs(path, monkeypatch):
  for name, value in (("FGD_SMALL", "1"), ("JAX_PLATFORMS", "cpu"), ("MPLBACKEND", "agg"), ("PYTHONPATH", ROOT),
                      ("XLA_FLAGS", "")):
    monkeypatch.setenv(name, value)
  book = nbformat.read(path, as_version=4)
  nbclient.NotebookClient(book, timeout=300, kernel_name="python3",
                          resources={"metadata": {"path": os.path.dirname(path)}}).execute()
  run = [cell for cell in book.cells if cell.cell_type == "code"]
  assert len(run) >= 4 and all(cell.execution_count for cell in run)
  printed = [o for cell in run for o in cell.outputs if o.output_type in ("stream", "execute_result", "display_data")]
  assert any(o.get("name") == "stdout" for o in printed)
  assert not [o for o in printed if o.get("name") == "stderr"], "no warnings"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=os.path.basename)
def test_notebook_is_stored_clean_and_opens_in_colab(path):
  book = nbformat.read(path, as_version=4)
  nbformat.validate(book)
  code = [cell for cell in book.cells if cell.cell_type == "code"]
  assert not any(cell.outputs or cell.execution_count for cell in code)
  assert f"/colabs/{os.path.basename(path)})" in book.cells[0].source and "colab-badge" in book.cells[0].source
  assert "pip" in code[0].source and "find_spec" in code[0].source
  assert book.metadata.kernelspec.name == "python3"
