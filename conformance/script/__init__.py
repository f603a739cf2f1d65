"""The standalone script of a failure, which needs torch alone."""
