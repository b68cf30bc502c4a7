//! Gives the compiler a hash of its own sources and of the partitioner's.

mod source_hash;

fn main() -> std::io::Result<()> {
    source_hash::set("KILN_COMPILER_SOURCES", &["src", "../kiln-partition/src"])
}
