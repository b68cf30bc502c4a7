//! The CUDA C++ of templates: kernels whose numbers are a parameter.
//!
//! ```text
//! y[i / 37 * 40] = x[i];                 y[i / @_n0{} * (int)@_n1{}] = x[i];
//! constexpr int EXTENT = 296;    ──►     constexpr kiln_as<int, @_n2> EXTENT{};
//! kernel(x, y)                           kernel(x, y, numbers)        numbers = {37, its reciprocal, 40, 296}
//! ```
//!
//! The parameter is passed by value, so its words are in the constant memory of the launch, where
//! instructions read them as they read constants. `numbers.cuh` declares the objects that stand for literals.

use std::fmt::Write as _;

use kiln_family::text::{Kind, is_int};
use kiln_family::{Reading, Skeleton, Slot, Template};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::scan::{Literal, Place, Scanned, scan};
use crate::code::FunctionText;
use crate::kernels::NUMBERS;

/// Bytes that the parameters of a kernel may have.
const PARAMETER_BYTES: usize = 4096;

/// A kernel of a step, without its name there.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct FamilyFunction {
    /// What kind of kernel it is, in a word.
    pub kind: String,
    /// What it is.
    pub text: FunctionText,
    /// Whether it looks whether the step was stopped.
    pub guarded: bool,
}

/// A template as a kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Written {
    /// Its name.
    pub name: String,
    /// What it is. Its last parameter are the numbers, if it has any.
    pub text: FunctionText,
    /// Whether it looks whether the step was stopped.
    pub guarded: bool,
    /// The numbers.
    pub numbers: Vec<Number>,
}

/// A number of a kernel's parameter.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Number {
    /// Which of the function's values it is.
    pub value: usize,
    /// What kind of literal it stands for.
    pub kind: Kind,
    /// Whether it comes with its reciprocal, in one word more.
    pub divides: bool,
}

impl Number {
    /// How many words of eight bytes it takes.
    fn words(self) -> usize {
        1 + usize::from(self.divides)
    }
}

impl Written {
    /// The parameter of a call that stands for a function with these values.
    pub fn words(&self, values: &[i64]) -> Vec<u64> {
        let mut words = Vec::new();
        for number in &self.numbers {
            let value = values[number.value];
            match number.kind {
                Kind::Integer | Kind::Unsigned if number.divides => {
                    let reciprocal = Reciprocal::of(value as u32);
                    words.push(u64::from(value as u32) | u64::from(reciprocal.multiplier) << 32);
                    words.push(u64::from(reciprocal.first) | u64::from(reciprocal.second) << 32);
                }
                Kind::Integer | Kind::Long | Kind::Unsigned | Kind::Double => words.push(value as u64),
                Kind::Float => words.push(u64::from((f64::from_bits(value as u64) as f32).to_bits())),
            }
        }
        words
    }
}

/// What divides a number of 32 bits by a divisor: `t = n * multiplier >> 32`, then
/// `(t + ((n - t) >> first)) >> second`. From Granlund and Montgomery, "Division by Invariant Integers using
/// Multiplication" (1994), figure 4.1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reciprocal {
    /// 32 bits of the reciprocal.
    pub multiplier: u32,
    /// The first shift.
    pub first: u32,
    /// The second.
    pub second: u32,
}

impl Reciprocal {
    /// That of `divisor`. A divisor of zero has none: the text divides by it nowhere that is reached.
    pub fn of(divisor: u32) -> Self {
        let wide = u64::from(divisor.max(1));
        let bits = u64::BITS - (wide - 1).leading_zeros();
        let multiplier = ((1_u64 << 32) * ((1_u64 << bits) - wide) / wide + 1) as u32;
        Self {
            multiplier,
            first: bits.min(1),
            second: bits.saturating_sub(1),
        }
    }

    /// `n` by the divisor.
    pub fn quotient(self, n: u32) -> u32 {
        let high = ((u64::from(n) * u64::from(self.multiplier)) >> 32) as u32;
        (high + ((n - high) >> self.first)) >> self.second
    }
}

/// A function's text: helpers, then a head, then the statements from a byte on.
fn whole(function: &FamilyFunction) -> (String, usize) {
    let FunctionText {
        helpers,
        parameters,
        body,
        ..
    } = &function.text;
    let mut text = format!("{helpers}\nvoid @({})\n{{\n", parameters.join(", "));
    let start = text.len();
    text.push_str(body);
    text.push_str("\n}\n");
    (text, start)
}

/// A function in parts.
pub fn read(function: &FamilyFunction) -> Reading {
    let (text, _) = whole(function);
    let scanned = scan(&text);
    let FunctionText {
        threads,
        blocks,
        device_only,
        ..
    } = function.text;
    let mut hash = Sha256::new();
    hash.update(format!("{threads} {blocks} {device_only} {}", function.guarded));
    for (word, literal) in scanned.words.iter().zip(&scanned.literal_of) {
        match literal {
            Some(literal) => hash.update(scanned.literals[*literal].kind.marker()),
            None => {
                hash.update(word.text);
                hash.update([0]);
            }
        }
    }
    let slot = |literal: &Literal| Slot {
        kind: literal.kind,
        free: literal.place != Place::Constant,
    };
    Reading {
        skeleton: Skeleton(hash.finalize().into()),
        values: scanned.literals.iter().map(|literal| literal.value).collect(),
        slots: scanned.literals.iter().map(slot).collect(),
    }
}

/// The kernel of a template; none if it has more numbers than parameters of a kernel hold.
pub fn write(template: &Template<FamilyFunction>) -> Option<Written> {
    let function = &template.base.function;
    let (text, start) = whole(function);
    let scanned = scan(&text);
    let numbers = numbers(template, &scanned);
    let mut made = function.text.clone();
    if !numbers.is_empty() {
        let parameter = made.parameters.len();
        let words: usize = numbers.iter().map(|number| number.words()).sum();
        if 8 * (words + parameter + 1) > PARAMETER_BYTES {
            return None;
        }
        let (helpers, body) = rewrite(template, &numbers, &text, &scanned, start);
        made.helpers = format!("{NUMBERS}{}{helpers}", declare(&numbers, parameter, words));
        made.body = format!("KILN_ENTER(@)\n{body}");
    }
    let mut hash = Sha256::new();
    let FunctionText { threads, blocks, .. } = made;
    hash.update(format!(
        "{threads} {blocks} {} {:?}",
        function.guarded, made.parameters
    ));
    hash.update(&made.helpers);
    hash.update([0]);
    hash.update(&made.body);
    let mut name = format!("{}_", function.kind);
    for byte in &hash.finalize()[..6] {
        let _ = write!(name, "{byte:02x}");
    }
    if !numbers.is_empty() {
        made.parameters.push(format!("KILN_PARAMETER({name})"));
    }
    Some(Written {
        name,
        text: made,
        guarded: function.guarded,
        numbers,
    })
}

/// The numbers of a template, by variable.
fn numbers(template: &Template<FamilyFunction>, scanned: &Scanned<'_>) -> Vec<Number> {
    let pattern = &template.pattern;
    let mut numbers: Vec<Number> = (0..pattern.variables.len())
        .map(|variable| Number {
            value: pattern.variables[variable],
            kind: match template.variable(variable) {
                (Kind::Integer, value) if !is_int(value) => Kind::Long,
                (kind, _) => kind,
            },
            divides: false,
        })
        .collect();
    for (literal, hole) in scanned.literals.iter().zip(&pattern.holes) {
        let Some(variable) = *hole else { continue };
        let is_word = matches!(numbers[variable].kind, Kind::Integer | Kind::Unsigned);
        let may_divide = matches!(
            literal.place,
            Place::Statement { divides: true } | Place::Named(_)
        );
        numbers[variable].divides |= is_word && may_divide;
    }
    numbers
}

/// The type of a number.
fn type_of(kind: Kind) -> &'static str {
    match kind {
        Kind::Integer => "int",
        Kind::Unsigned => "unsigned",
        Kind::Long => "long",
        Kind::Float => "float",
        Kind::Double => "double",
    }
}

/// Declarations of the parameter's structure and of the objects that stand for its words.
fn declare(numbers: &[Number], parameter: usize, words: usize) -> String {
    let mut text = format!("KILN_NUMBERS_OF(@, {words})\n");
    let mut word = 0;
    for (at, number) in numbers.iter().enumerate() {
        let byte = 8 * word;
        word += number.words();
        let ty = type_of(number.kind);
        let _ = if number.divides {
            let (multiplier, first, second) = (byte + 4, byte + 8, byte + 12);
            writeln!(
                text,
                "KILN_DIVISOR(@_n{at}, {ty}, @, {parameter}, {byte}, {multiplier}, {first}, {second})"
            )
        } else {
            let (form, register) = match ty {
                "long" => ("b64", "l"),
                "float" => ("f32", "f"),
                "double" => ("f64", "d"),
                _ => ("b32", "r"),
            };
            writeln!(
                text,
                "KILN_NUMBER(@_n{at}, {ty}, \"{form}\", \"{register}\", @, {parameter}, {byte})"
            )
        };
    }
    text
}

/// Helpers and statements, with objects in place of literals.
fn rewrite(
    template: &Template<FamilyFunction>,
    numbers: &[Number],
    text: &str,
    scanned: &Scanned<'_>,
    start: usize,
) -> (String, String) {
    let mut made = [String::new(), String::new()];
    let helpers_end = template.base.function.text.helpers.len();
    // The head between the two parts has no literals.
    let parts = [(0, helpers_end), (start, text.len() - "\n}\n".len())];
    for (made, (from, to)) in made.iter_mut().zip(parts) {
        let mut done = from;
        for (literal, hole) in scanned.literals.iter().zip(&template.pattern.holes) {
            let Some(variable) = hole else { continue };
            if !(from..to).contains(&literal.at) {
                continue;
            }
            let end = literal.at + literal.length;
            match literal.place {
                Place::Named(named) => {
                    made.push_str(&text[done..named.type_from]);
                    let ty = &text[named.type_from..named.type_to];
                    let _ = write!(made, "kiln_as<{ty}, @_n{variable}>");
                    made.push_str(&text[named.type_to..named.name_to]);
                    made.push_str("{}");
                }
                // What divides finds the operators of `numbers.cuh` by its type.
                Place::Statement { divides: true } if numbers[*variable].divides => {
                    made.push_str(&text[done..literal.at]);
                    let _ = write!(made, "@_n{variable}{{}}");
                }
                _ => {
                    made.push_str(&text[done..literal.at]);
                    let ty = type_of(numbers[*variable].kind);
                    let _ = write!(made, "({ty})@_n{variable}{{}}");
                }
            }
            done = end;
        }
        made.push_str(&text[done..to]);
    }
    let [helpers, body] = made;
    (helpers, body)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kiln_family::template::Sample;
    use kiln_family::{Template, Unit};

    use super::*;

    #[test]
    fn reciprocals_divide() {
        let mut numbers: Vec<u32> = (0..200)
            .chain((0..32).flat_map(|bit| [(1_u32 << bit) - 1, 1 << bit, (1 << bit) + 1]))
            .collect();
        numbers.extend([u32::MAX, u32::MAX - 1, 3_000_000_001, 641, 6_700_417, 0x8000_0001]);
        for &divisor in numbers.iter().filter(|divisor| **divisor > 0) {
            let reciprocal = Reciprocal::of(divisor);
            let near = |n: u32| [n.wrapping_sub(1), n, n.wrapping_add(1)];
            let multiples = [1, 2, 3, 1000, u32::MAX / divisor].map(|times| divisor.wrapping_mul(times));
            for n in numbers.iter().copied().chain(multiples).flat_map(near) {
                assert_eq!(reciprocal.quotient(n), n / divisor, "{n} / {divisor}");
            }
        }
    }

    fn function(number: i64, other: i64) -> FamilyFunction {
        FamilyFunction {
            kind: "rows".into(),
            guarded: false,
            text: FunctionText {
                helpers: format!("struct @_case {{ static constexpr int queries = {number}; }};\n"),
                parameters: vec!["const float* a0".into(), "float* a1".into()],
                body: format!(
                    "kiln_lanes<float, 4> v[3];\nif (i < {number}) a1[i / {number} % {other}] = a0[i + {other}] / {number}.0f;"
                ),
                threads: 128,
                ..FunctionText::default()
            },
        }
    }

    fn unit(function: &FamilyFunction) -> Arc<Unit<FamilyFunction>> {
        let Reading {
            skeleton,
            values,
            slots,
        } = read(function);
        let (function, slots) = (function.clone(), slots.into());
        Arc::new(Unit {
            function,
            skeleton,
            values,
            slots,
        })
    }

    /// A template with the values of a function in place of its objects is that function.
    fn instantiated(written: &Written, values: &[i64]) -> String {
        let mut text = format!("{}|{}", written.text.helpers, written.text.body);
        text = text[text.rfind("KILN_NUMBERS_OF").unwrap()..].to_owned();
        for (at, number) in written.numbers.iter().enumerate() {
            let value = match number.kind {
                Kind::Float => format!("{:?}f", f64::from_bits(values[number.value] as u64)),
                _ => values[number.value].to_string(),
            };
            let ty = type_of(number.kind);
            for object in [format!("({ty})@_n{at}{{}}"), format!("@_n{at}{{}}")] {
                text = text.replace(&object, &value);
            }
            text = text.replace(
                &format!("kiln_as<int, @_n{at}> queries{{}}"),
                &format!("int queries = {value}"),
            );
        }
        text
    }

    #[test]
    fn a_template_with_numbers_is_the_function() {
        let functions = [function(37, 8), function(48, 8), function(51, 9)];
        let units: Vec<_> = functions.iter().map(unit).collect();
        let sample = |unit: &Arc<Unit<FamilyFunction>>| Sample {
            units: vec![unit.clone()],
            share: 1,
        };
        let samples: Vec<_> = units[..2].iter().map(sample).collect();
        let found = kiln_family::template::generalise(&samples);
        let [found] = &found[..] else {
            panic!("{found:?}");
        };
        let template: &Template<FamilyFunction> = &found.template;
        // The second number is a constant: it has not varied.
        assert!(template.fits(&units[0]) && template.fits(&units[1]) && !template.fits(&units[2]));
        let written = write(template).unwrap();
        assert_eq!(
            written.text.parameters[2],
            format!("KILN_PARAMETER({})", written.name)
        );
        for (unit, function) in units.iter().zip(&functions[..2]) {
            let text = instantiated(&written, &unit.values);
            let helpers = text.split_once('|').unwrap().0;
            assert!(helpers.ends_with(&function.text.helpers), "{text}");
            assert!(
                text.ends_with(&format!("|KILN_ENTER(@)\n{}", function.text.body)),
                "{text}"
            );
        }
        let words = written.words(&units[1].values);
        assert_eq!(words[0] as u32, 48);
        // 48 with its reciprocal, and 48.0f.
        assert_eq!(words.len(), 3);
        assert_eq!(f32::from_bits(words[2] as u32), 48.0);
        assert!(words[1] == u64::from(Reciprocal::of(48).first) | u64::from(Reciprocal::of(48).second) << 32);
    }
}
