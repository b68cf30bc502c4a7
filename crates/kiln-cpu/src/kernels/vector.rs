//! The C headers that generated sources include: vectors of a fixed width, and mathematics on them.
//!
//! They are plain C files (`c/kiln_vector.h`, `c/kiln_math.h`), readable as such; only the width comes from
//! here. Functions are named by type and operation: `vf_exp` takes and returns a vector of floats, `sf_exp`
//! one float with the same bits that a lane would have.

use std::fmt::Write as _;

use crate::build::SourceFile;
use crate::isa::Isa;

/// Number of f32 lanes of generated vectors. At least four: narrower machines get the compiler's lowering
/// of vectors, which is right everywhere.
pub fn lanes(isa: Isa) -> usize {
    isa.lanes().max(4)
}

/// The headers, as files of a source tree.
pub fn headers() -> Vec<SourceFile> {
    vec![
        SourceFile::new("kiln_vector.h", include_str!("c/kiln_vector.h")),
        SourceFile::new("kiln_math.h", include_str!("c/kiln_math.h")),
    ]
}

/// Sections of the headers, each with parts of names: a source in which one of these occurs has the section.
/// To have one in vain costs a few milliseconds of the compiler; what a source lacks, the linker misses
/// (`Toolchain::build`).
const SECTIONS: [(&str, &[&str]); 13] = [
    ("F64", &["f64", "shortened"]),
    ("I16", &["i16"]),
    ("I8", &["i8"]),
    ("U64", &["u64"]),
    ("U16", &["u16"]),
    ("U8", &["u8"]),
    ("BOOL", &["bool"]),
    ("HALF", &["f16"]),
    ("QUOTIENTS", &["div_", "rem_", "pow_", "shl_", "shr_"]),
    ("CASTS", &["_to_"]),
    ("FOLDS", &["fold_"]),
    ("RANDOM", &["uniform", "normal", "random", "vu_multiply"]),
    (
        "MATH",
        &[
            "exp", "log", "tan", "sigmoid", "erf", "sin", "cos", "pow", "floor", "ceil", "trunc", "round",
            "rem_", "normal", "fabs", "fmod", "rint",
        ],
    ),
];

/// The beginning of the source `text`: the width, then the headers with the sections that it needs.
pub fn prelude(isa: Isa, text: &str) -> String {
    let mut prelude = format!(
        "#define KILN_LANES {}\n#define KILN_FMA {}\n#define KILN_LEAN\n",
        lanes(isa),
        u8::from(isa.has_fma())
    );
    for (section, names) in SECTIONS {
        if names.iter().any(|name| text.contains(name)) {
            let _ = writeln!(prelude, "#define KILN_HAS_{section}");
        }
    }
    prelude.push_str("#include \"kiln_runtime.h\"\n#include \"kiln_math.h\"\n");
    prelude
}
