"""DeepCache: the deep layers of a UNet run on some calls only; others reuse their feature.

Ma, Fang, Wang, CVPR 2024, arXiv:2312.00858.
"""
