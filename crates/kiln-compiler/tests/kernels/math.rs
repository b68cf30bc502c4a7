//! Vector mathematics.
