"""`oomb bench attention`: every attention backend beside the kernels that people use otherwise."""
