//! Guards: kernels that stop a step when an index is out of range.
//!
//! A guard compares the least and the largest index with the bound and leaves a mark. Kernels that
//! overwrite an argument of the step read the mark and, if it is set, do nothing. The mark stays until the
//! next call, so a step that stopped has overwritten nothing.

use crate::build::Source;
use crate::code::{CallKind, StepCode};

/// Name of the guard of check `number`.
pub fn name(number: u32) -> String {
    format!("guard_{number}")
}

/// The program of all guards of a step; none if it has none.
pub fn source(code: &StepCode) -> Option<Source> {
    let mut text = String::new();
    for call in &code.calls {
        let CallKind::Guard {
            check, dtype, extent, ..
        } = &call.kind
        else {
            continue;
        };
        let ty = match dtype.as_str() {
            "i8" => "signed char",
            "u8" | "bool" => "unsigned char",
            "i16" => "short",
            "u16" => "unsigned short",
            "i32" => "int",
            "u32" => "unsigned int",
            "u64" => "unsigned long long",
            _ => "long long",
        };
        let name = name(*check);
        let mark = check + 1;
        // An unsigned index is never below zero, and its high bits must not make it look negative.
        let below = if dtype.starts_with('i') {
            "*least < 0 || "
        } else {
            ""
        };
        text.push_str(&format!(
            "extern \"C\" __global__ void {name}(const {ty}* least, const {ty}* most, int* stopped)\n{{\n    \
             if ({below}(unsigned long long)*most >= {extent}ull) *stopped = {mark};\n}}\n"
        ));
    }
    (!text.is_empty()).then(|| Source {
        name: "guards".into(),
        text,
    })
}
