"""Pictures on disk: found, read, sized, grouped, named, written and resumed.

Needs Pillow and nothing else; no torch, no host. The steps of a run, in order:

    finding   files and folders → pictures, in natural order
    facts     sizes from the files' headers
    sizing    a rule such as "longest:768" → target and canvas of each picture
    grouping  pictures of one canvas together, read lazily, in batches
    naming    a template → one distinct name for each output
    resume    which outputs are done already, which are to be written
    writing   PNG, atomically, with infotext and the job's digest

What could not be used, and why, is collected in a `report.Report`.
"""
