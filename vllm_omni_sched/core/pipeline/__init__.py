"""Schedule requests through the stages of a pipeline: events in, actions out."""
