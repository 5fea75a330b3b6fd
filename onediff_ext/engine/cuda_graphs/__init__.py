"""Captures: a model's whole forward of one shape, replayed as a CUDA graph.

`call` reads the arguments, `watch` sees whether what a capture froze is unchanged, `recorder`
makes CUDA graphs, `captures` bounds how many are alive, `forward` decides when to use one,
`ladder` says what is given up when memory is short.
"""
