//! Tests of the models against fixtures made from the originals, see `tests/make_fixtures.py`.

mod architectures;
mod configs;
mod fixture;
mod generation;
mod parity;
mod training;
