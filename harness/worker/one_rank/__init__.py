"""One rank that stands for many: it computes what every rank of a layout computes, in their order and to the bit."""
