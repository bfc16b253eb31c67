"""Tables of benchmarks, their commands, and documents with the tables; see `documents`."""
