"""Coverage on a real table: progression of diabetes given four measurements (Efron et al., 2004).

Half of the 442 patients are fitted, the other half is checked.

    python docs/examples/diabetes.py
"""

from pathlib import Path

from sklearn.datasets import load_diabetes

import ciflows
from ciflows.runs.check import write_picture

GIVEN = ["bmi", "bp", "s3", "s5"]

data = load_diabetes(as_frame=True, scaled=False).frame[[*GIVEN, "target"]]
half = data.sample(frac=0.5, random_state=0)
run = ciflows.fit(half, given=GIVEN, seed=0)
coverage = run.coverage(data.drop(half.index))
print(coverage)
print(run.interval(0.8, data.drop(half.index)[GIVEN].head(3)).round(1))
write_picture(coverage, Path())
