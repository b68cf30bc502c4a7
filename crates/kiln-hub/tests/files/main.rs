//! Checkpoints from files and from the hub: what is read, what is written, what is refused.

mod common;
mod damaged_files;
mod hub_client;
mod load_save;
mod real_models;
mod statistics;
