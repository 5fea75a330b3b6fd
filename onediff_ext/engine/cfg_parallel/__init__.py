"""One forward on two devices: half of its batch, such as the negative prompt's, on each.

second_device   which device takes the other half
call_halves     one call as two, with the tensors of one half on the other device
model_replica   a copy of a model on another device, which follows the model
"""
