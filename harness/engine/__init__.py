"""Where ranks run: engines that turn a job into the outcomes of its ranks. Torch-free; knows no case and no check."""
