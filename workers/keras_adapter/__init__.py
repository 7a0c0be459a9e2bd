"""Capture from Keras 2 and 3: `fit`, `evaluate`, `predict`, and loops with a GradientTape.

Who owns a step (each box holds the ones it points to):

    Keras            calls model.train_function, test_function or predict_function
      |
      v
    Phase            phase.py: stands in for that function during one fit, evaluate or predict;
      |              counts steps; asks which are due. Phases (phases.py) installs and removes it
      v
    StepRunner       step_runner.py: runs an execution in which a step is due. Strategies:
      |                TracedStep    traced_step.py      one process: our own function, which also
      |                                                  returns what its probes see
      |                InGraphStep   in_graph_step.py    several processes: Keras' function, traced
      |                                                  so that it calls back on due steps
      |                ResultsOnly   step_runner.py      inside out of reach: losses and metrics only
      v
    StepProbes       step_probes.py: replaced methods of layers, model and optimizers while a step is
      |              traced or run eagerly; CaptureSet (capture_set.py) says which
      v
    KerasRecording        recording.py: what the plan wants of the step, by name
      |              (VariableNames: variable_names.py; per model: model_cache.py)
      v
    Replicas         replicas.py: one recorder and capture session for each replica of this process

`TapeLoops` (tape_loops.py) takes the place of Phase and StepRunner in loops that a script writes
itself: a wrapped GradientTape begins each step.

`KerasHook` (hook.py) is the callback that Keras calls; it holds Phases, TapeLoops and KerasRecording.
"""

from __future__ import annotations
