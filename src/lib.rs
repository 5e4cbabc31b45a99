//! postrider: the program around the pipeline.
