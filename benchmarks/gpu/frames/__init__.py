"""Frames that NVDEC decodes: are they on the GPU sooner if they stay there than through host memory?"""
