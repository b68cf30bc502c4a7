//! The numbers that templates compute with, and how these lie in memory.
//!
//! Registers hold [`Element`]s: f32, or f64 with half as many lanes. Memory holds [`Storage`]: those types,
//! or one of the 16-bit formats, which are widened to f32 when they are loaded and rounded once when they
//! are stored.

use super::tile::amx;
use super::{Width, vector};
use crate::isa::Isa;

/// A type of registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Element {
    /// `float` and `vf`.
    #[default]
    F32,
    /// `double` and `vd`.
    F64,
}

impl Element {
    /// C type of one number.
    pub fn ctype(self) -> &'static str {
        match self {
            Self::F32 => "float",
            Self::F64 => "double",
        }
    }

    /// C type of a vector, with which the names of functions on it begin.
    pub fn vector(self) -> &'static str {
        match self {
            Self::F32 => "vf",
            Self::F64 => "vd",
        }
    }

    /// C types of one number and of a vector.
    pub fn ctypes(self) -> (&'static str, &'static str) {
        (self.ctype(), self.vector())
    }

    /// C type of a vector of integers with as many lanes, such as masks, with which the names of functions
    /// on it begin.
    pub fn integers(self) -> &'static str {
        match self {
            Self::F32 => "vi",
            Self::F64 => "vl",
        }
    }

    /// C type of one of those integers.
    pub fn integer(self) -> &'static str {
        match self {
            Self::F32 => "int32_t",
            Self::F64 => "int64_t",
        }
    }

    /// The beginning of the names of functions on one number.
    pub fn scalar(self) -> &'static str {
        match self {
            Self::F32 => "sf",
            Self::F64 => "sd",
        }
    }

    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// Numbers in a vector.
    pub fn lanes(self, isa: Isa) -> usize {
        vector::lanes(isa) * 4 / self.bytes()
    }
}

/// What register tiles multiply and packed panels hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Factor {
    /// `float`.
    #[default]
    F32,
    /// `double`.
    F64,
    /// `bf16_pair`: two neighbours along the depth, the first in the lower half. One instruction multiplies
    /// them with another pair and adds both products to an f32. It takes subnormal numbers for zero, and
    /// rounds after each of the two products.
    Bf16Pair,
    /// `bf16_pair`, of which one instruction multiplies a tile of 16 rows by 16 steps of the depth with
    /// another of 16 steps by 16 columns ([`super::tile::amx`]).
    Bf16Tile,
}

impl Factor {
    /// The type in which products are added up.
    pub fn sum(self) -> Element {
        match self {
            Self::F32 | Self::Bf16Pair | Self::Bf16Tile => Element::F32,
            Self::F64 => Element::F64,
        }
    }

    /// C type of one of them.
    pub fn ctype(self) -> &'static str {
        match self {
            Self::F32 => "float",
            Self::F64 => "double",
            Self::Bf16Pair | Self::Bf16Tile => "bf16_pair",
        }
    }

    /// C type of a vector, with which the names of functions on it begin.
    pub fn vector(self) -> &'static str {
        match self {
            Self::F32 => "vf",
            Self::F64 => "vd",
            Self::Bf16Pair | Self::Bf16Tile => "vu",
        }
    }

    /// Elements of the depth that one holds.
    pub fn depth(self) -> usize {
        match self {
            Self::F32 | Self::F64 => 1,
            Self::Bf16Pair | Self::Bf16Tile => 2,
        }
    }

    /// Packed panels hold a multiple of so many steps of the depth.
    pub fn steps(self) -> usize {
        match self {
            Self::Bf16Tile => amx::EXTENT,
            _ => 1,
        }
    }
}

impl From<Element> for Factor {
    fn from(element: Element) -> Self {
        match element {
            Element::F32 => Self::F32,
            Element::F64 => Self::F64,
        }
    }
}

/// How numbers lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Storage {
    /// As f32.
    F32,
    /// As f64.
    F64,
    /// As IEEE half precision, computed with as f32.
    F16,
    /// As the upper half of an f32, computed with as f32.
    BF16,
}

impl Storage {
    /// Their type in registers.
    pub fn element(self) -> Element {
        match self {
            Self::F64 => Element::F64,
            _ => Element::F32,
        }
    }

    /// Whether registers hold what memory does.
    pub fn is_plain(self) -> bool {
        matches!(self, Self::F32 | Self::F64)
    }

    /// C type of one number in memory.
    pub fn ctype(self) -> &'static str {
        match self {
            Self::F32 => "float",
            Self::F64 => "double",
            Self::F16 | Self::BF16 => "uint16_t",
        }
    }

    /// C expression of the number, or the vector of neighbours, at the address `place`.
    pub fn load(self, width: Width, place: &str) -> String {
        match (self, width) {
            (Self::F32 | Self::F64, Width::Scalar) => format!("*({place})"),
            (Self::F32, Width::Vector) => format!("vf_load({place})"),
            (Self::F64, Width::Vector) => format!("vd_load({place})"),
            (Self::F16, Width::Scalar) => format!("sf_from_f16(*({place}))"),
            (Self::F16, Width::Vector) => format!("vf_load_f16({place})"),
            (Self::BF16, Width::Scalar) => format!("sf_from_bf16(*({place}))"),
            (Self::BF16, Width::Vector) => format!("vf_load_bf16({place})"),
        }
    }

    /// Statement that stores `value` at the address `place`.
    pub fn store(self, width: Width, place: &str, value: &str) -> String {
        match (self, width) {
            (Self::F32 | Self::F64, Width::Scalar) => format!("*({place}) = {value};"),
            (Self::F32, Width::Vector) => format!("vf_store({place}, {value});"),
            (Self::F64, Width::Vector) => format!("vd_store({place}, {value});"),
            (Self::F16, Width::Scalar) => format!("*({place}) = f16_from_sf({value});"),
            (Self::F16, Width::Vector) => format!("vf_store_f16({place}, {value});"),
            (Self::BF16, Width::Scalar) => format!("*({place}) = bf16_from_sf({value});"),
            (Self::BF16, Width::Vector) => format!("vf_store_bf16({place}, {value});"),
        }
    }

    /// The beginning and the end of the names of functions on vectors in memory.
    fn affixes(self) -> (&'static str, &'static str) {
        match self {
            Self::F32 => ("vf", ""),
            Self::F64 => ("vd", ""),
            Self::F16 => ("vf", "_f16"),
            Self::BF16 => ("vf", "_bf16"),
        }
    }

    /// C expression of the vector of the first `count` (at most a vector's) neighbours at the address
    /// `place`, the rest of it zero.
    pub fn load_some(self, place: &str, count: &str) -> String {
        let (vf, format) = self.affixes();
        format!("{vf}_load_n{format}({place}, {count})")
    }

    /// C expression of the vector of numbers `stride` apart from the address `place` on.
    pub fn load_spaced(self, place: &str, stride: i64) -> String {
        let (vf, format) = self.affixes();
        match stride {
            1 => self.load(Width::Vector, place),
            _ => format!("{vf}_load_stride{format}({place}, {stride})"),
        }
    }

    /// Statement that stores the vector `value` to numbers `stride` apart from the address `place` on.
    pub fn store_spaced(self, place: &str, stride: i64, value: &str) -> String {
        let (vf, format) = self.affixes();
        match stride {
            1 => self.store(Width::Vector, place, value),
            _ => format!("{vf}_store_stride{format}({place}, {stride}, {value});"),
        }
    }
}
