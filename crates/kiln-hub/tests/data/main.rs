//! Order, prefetch, resume, and what each kind of data means.

mod files;
mod images;
mod loader;
mod text;
