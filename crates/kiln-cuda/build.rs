//! Gives the target a hash of its own sources.

#[path = "../kiln-compiler/source_hash.rs"]
mod source_hash;

fn main() -> std::io::Result<()> {
    source_hash::set("KILN_CUDA_SOURCES", &["src"])
}
