//! The C headers that generated sources include: vectors of a fixed width, and mathematics on them.
//!
//! They are plain C files (`c/kiln_vector.h`, `c/kiln_math.h`), readable as such; only the width comes from
//! here. Functions are named by type and operation: `vf_exp` takes and returns a vector of floats, `sf_exp`
//! one float with the same bits that a lane would have.

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

/// The beginning of a generated source: the width, then the headers.
pub fn prelude(isa: Isa) -> String {
    format!(
        "#define KILN_LANES {}\n#define KILN_FMA {}\n#include \"kiln_runtime.h\"\n#include \"kiln_math.h\"\n",
        lanes(isa),
        u8::from(isa.has_fma())
    )
}
