"""Where text comes from: the kinds of files and data sets, and how a stream reads them."""
