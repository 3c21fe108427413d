"""Reports: one HTML page, or one picture, for some trained runs."""

from ciflows.report.comparison import compare_picture
from ciflows.report.grids import DensityGrid, Entry, density_grids, in_plane
from ciflows.report.html import write_report

__all__ = ["DensityGrid", "Entry", "compare_picture", "density_grids", "in_plane", "write_report"]
