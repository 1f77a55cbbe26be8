"""Plots and the report. `python -m fgd_jax.report DIR... --out=report.html` compares runs on one page.

runs.py reads folders, groups.py puts seeds together, hours.py asks the simulator for times, figures.py draws, page.py
writes; curves.py is the picture in a single run's folder.
"""
