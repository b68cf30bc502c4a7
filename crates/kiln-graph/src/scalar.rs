//! Single values: constants of a graph and runtime scalars.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use crate::DType;

/// One number, in the widest type of its kind. The dtype that it is used with decides its value there
/// ([`Scalar::to_f64`], [`Scalar::to_i64`]). Equality and hashing are by bits, so that NaN equals itself
/// and 0.0 differs from -0.0: two constants are equal exactly if no executor could tell them apart.
#[derive(Clone, Copy, Debug)]
pub enum Scalar {
    /// A floating point number.
    Float(f64),
    /// A signed integer.
    Int(i64),
    /// An unsigned integer.
    UInt(u64),
    /// A truth value.
    Bool(bool),
}

impl Scalar {
    /// The value as f64. Integers round to nearest; `true` is 1.
    pub fn to_f64(self) -> f64 {
        match self {
            Scalar::Float(x) => x,
            Scalar::Int(x) => x as f64,
            Scalar::UInt(x) => x as f64,
            Scalar::Bool(x) => f64::from(u8::from(x)),
        }
    }

    /// The value as i64. Floats truncate toward zero and saturate, NaN is 0; u64 keeps its bits.
    pub fn to_i64(self) -> i64 {
        match self {
            Scalar::Float(x) => x as i64,
            Scalar::Int(x) => x,
            Scalar::UInt(x) => x as i64,
            Scalar::Bool(x) => i64::from(x),
        }
    }

    /// The value as a truth value: anything but zero is true.
    pub fn to_bool(self) -> bool {
        match self {
            Scalar::Float(x) => x != 0.0,
            Scalar::Int(x) => x != 0,
            Scalar::UInt(x) => x != 0,
            Scalar::Bool(x) => x,
        }
    }

    /// The value in the form natural to `dtype`: `Float` for floats, `Int`/`UInt` for integers, `Bool` for
    /// bool.
    pub fn cast(self, dtype: DType) -> Scalar {
        match dtype {
            DType::Bool => Scalar::Bool(self.to_bool()),
            _ if dtype.is_float() => Scalar::Float(self.to_f64()),
            _ if dtype.is_unsigned_int() => match self {
                Scalar::Float(x) => Scalar::UInt(x as u64),
                other => Scalar::UInt(other.to_i64() as u64),
            },
            _ => Scalar::Int(self.to_i64()),
        }
    }

    /// The eight bytes in which a runtime scalar of type `dtype` is handed to an executable: the bits of an
    /// f64 for every float type, of an i64 or u64 for integers, 0 or 1 for bool.
    pub fn to_bits(self, dtype: DType) -> u64 {
        match self.cast(dtype) {
            Scalar::Float(x) => x.to_bits(),
            Scalar::Int(x) => x as u64,
            Scalar::UInt(x) => x,
            Scalar::Bool(x) => u64::from(x),
        }
    }

    fn tag(self) -> (u8, u64) {
        match self {
            Scalar::Float(x) => (0, x.to_bits()),
            Scalar::Int(x) => (1, x as u64),
            Scalar::UInt(x) => (2, x),
            Scalar::Bool(x) => (3, u64::from(x)),
        }
    }
}

impl PartialEq for Scalar {
    fn eq(&self, other: &Self) -> bool {
        self.tag() == other.tag()
    }
}

impl Eq for Scalar {}

impl Hash for Scalar {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.tag().hash(state);
    }
}

impl fmt::Display for Scalar {
    /// Floats always show a point, an exponent or a word (`1.0`, `1e-5`, `inf`, `nan`), so that the kind
    /// survives being parsed back; unsigned integers end in `u`. A NaN other than the usual one shows its
    /// bits (`nan0xfff8…`).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scalar::Float(x) if x.to_bits() == f64::NAN.to_bits() => f.write_str("nan"),
            Scalar::Float(x) if x.is_nan() => write!(f, "nan{:#x}", x.to_bits()),
            Scalar::Float(x) => write!(f, "{x:?}"),
            Scalar::Int(x) => write!(f, "{x}"),
            Scalar::UInt(x) => write!(f, "{x}u"),
            Scalar::Bool(x) => write!(f, "{x}"),
        }
    }
}

impl FromStr for Scalar {
    type Err = NotAScalar;

    /// Reads what `Display` writes.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || NotAScalar(text.to_owned());
        if let Ok(truth) = text.parse() {
            return Ok(Scalar::Bool(truth));
        }
        if let Some(bits) = text.strip_prefix("nan0x") {
            let value = u64::from_str_radix(bits, 16).map(f64::from_bits);
            return value
                .ok()
                .filter(|x| x.is_nan())
                .map(Scalar::Float)
                .ok_or_else(error);
        }
        if let Some(digits) = text.strip_suffix('u') {
            return digits.parse().map(Scalar::UInt).map_err(|_| error());
        }
        if text.contains(['.', 'e', 'E', 'n', 'N']) {
            return match text {
                "nan" => Ok(Scalar::Float(f64::NAN)),
                _ => text.parse().map(Scalar::Float).map_err(|_| error()),
            };
        }
        text.parse().map(Scalar::Int).map_err(|_| error())
    }
}

/// A text that is no single value.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{0}` is no number, truth value, inf or nan")]
pub struct NotAScalar(pub String);

impl From<f64> for Scalar {
    fn from(value: f64) -> Self {
        Scalar::Float(value)
    }
}

impl From<i64> for Scalar {
    fn from(value: i64) -> Self {
        Scalar::Int(value)
    }
}

impl From<u64> for Scalar {
    fn from(value: u64) -> Self {
        Scalar::UInt(value)
    }
}

impl From<bool> for Scalar {
    fn from(value: bool) -> Self {
        Scalar::Bool(value)
    }
}
