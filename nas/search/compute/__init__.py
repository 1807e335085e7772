"""Where exports, gates and trainings run: Ray, locally or on a cluster, and the functions of its workers."""
