"""DeepCache: the deep part of a UNet runs on some calls only, its feature is reused on others.

Ma, Fang, Wang, CVPR 2024, arXiv:2312.00858.
"""
