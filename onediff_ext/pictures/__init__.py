"""Images on disk: found, read, sized, named and written, without torch and without a host.

finding          files and folders → images, in natural order
picture_header   an image's size and format, from its header
reading          an image's pixels: upright, 8-bit sRGB, first frame
stored_pixels    what Pillow leaves as the file has it
size_rules       rules such as ``longest:1024`` → the size of a result
canvas_sizes     the size that the model generates for it
canvas_images    an image on its canvas, and a result cut out of its canvas
captions         an image's own prompt
naming           templates → file names
writing          PNG files, whole or not at all, with infotext and the job's digest
new_files        a result in a file of its own, beside other processes
infotext_format  the WebUI's text of how an image was made: read and written
png_chunks       the text chunks of PNG files
skipped          inputs that were left out, with the reasons
batch/           one run over folders: planned, drawn, written and resumed
"""
