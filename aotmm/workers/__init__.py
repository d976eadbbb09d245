"""Tasks in worker processes, which may crash or hang: those of this machine (`pool`) or of a Dask cluster (`dask`)."""
