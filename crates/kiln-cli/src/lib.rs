//! The kiln command line.
