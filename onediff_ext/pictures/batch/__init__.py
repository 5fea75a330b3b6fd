"""One run over folders of images: planned, drawn batch by batch, written and resumed.

batch_job      inputs, sizes, names and seeds of a run
planning       folders → results that are still missing, each with size, name and digest
grouping       images of one canvas size together, read in batches
resume         which results exist already
batch_drawer   the port through which a host draws one batch
run_batches    the loop: read ahead, draw, write behind
background_io  the threads that read and write
"""
