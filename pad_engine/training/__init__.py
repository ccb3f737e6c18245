"""From a model pair and a task to a calibrated rule: tasks, labels, classifiers, calibration, evaluation."""
