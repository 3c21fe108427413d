"""Reports: one HTML page, or one picture, for some trained runs."""

from ciflows.report.grids import DensityGrid, Entry, density_grids, in_plane
from ciflows.report.html import write_report
from ciflows.report.plots import compare_picture

__all__ = ["DensityGrid", "Entry", "compare_picture", "density_grids", "in_plane", "write_report"]
