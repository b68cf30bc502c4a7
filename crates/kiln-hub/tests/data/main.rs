//! Order, prefetch, resume, shares of ranks, and what each kind of data means.

mod files;
mod images;
mod loader;
mod shares;
mod text;
