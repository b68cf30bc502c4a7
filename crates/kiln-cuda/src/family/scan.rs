//! CUDA C++ as tokens, and where a variable can stand for a number.
//!
//! A number is *free* where C++ takes a value that is known when the kernel runs:
//!
//! - in the statements of a function, and
//! - as the value of a named constant, `constexpr int EXTENT = 296;`, whose name stands in such places alone.
//!
//! Everything else stays a constant: template arguments, extents of arrays, headers of loops that are unrolled
//! completely, alignments, launch bounds, labels, what preprocessor lines say and what stands between them, and
//! whatever is a constant that such a place mentions. Where this file takes a place for free and NVRTC does
//! not, NVRTC rejects the template, and the function is compiled for each of its numbers.

use kiln_family::text::{Kind, Word, literal, unsigned, words};
use rustc_hash::FxHashSet;

/// A literal of a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Literal {
    /// What it is.
    pub kind: Kind,
    /// The integer, or the bits of the fraction as an `f64`.
    pub value: i64,
    /// Its first byte.
    pub at: usize,
    /// Its length in bytes.
    pub length: usize,
    /// Where it stands.
    pub place: Place,
}

/// Where a literal stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// In a statement; whether it is a divisor.
    Statement {
        /// Whether `/` or `%` stands before it.
        divides: bool,
    },
    /// The value of a named constant.
    Named(Named),
    /// Where C++ wants a constant.
    Constant,
}

/// A declaration such as `constexpr int EXTENT = 296;`, by bytes of the text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Named {
    /// The first byte of its type.
    pub type_from: usize,
    /// The byte behind its type.
    pub type_to: usize,
    /// The byte behind its name.
    pub name_to: usize,
}

/// A text in tokens.
#[derive(Debug, Default)]
pub struct Scanned<'a> {
    /// All tokens.
    pub words: Vec<Word<'a>>,
    /// Of each token, the literal that it is.
    pub literal_of: Vec<Option<usize>>,
    /// The literals, in order.
    pub literals: Vec<Literal>,
}

/// A bracket that is open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Open {
    /// `{` of a namespace, a class or an initialiser outside of functions.
    Transparent,
    /// `{` of a function, or inside of one.
    Body,
    /// `(` or `[` like any other.
    Plain,
    /// A bracket in which C++ wants constants, or in which they are worth much.
    Constant,
}

/// Words before `(` in which constants are wanted.
const CONSTANT_CALLS: [&str; 9] = [
    "static_assert",
    "alignas",
    "__align__",
    "__launch_bounds__",
    "asm",
    "constexpr",
    "sizeof",
    "volatile",
    "decltype",
];

/// Reads a text that the emitter wrote.
pub fn scan(text: &str) -> Scanned<'_> {
    let words: Vec<Word<'_>> = words(text).collect();
    let mut scanned = Scanned {
        literal_of: vec![None; words.len()],
        words,
        literals: Vec::new(),
    };
    let wanted = Places::of(text, &scanned.words);
    for (number, word) in scanned.words.iter().enumerate() {
        let Some((kind, value)) = literal(word.text).or_else(|| unsigned(word.text)) else {
            continue;
        };
        let place = match wanted.place[number] {
            Place::Named(_) if wanted.names.contains(scanned.words[number - 2].text) => Place::Constant,
            place => place,
        };
        scanned.literal_of[number] = Some(scanned.literals.len());
        scanned.literals.push(Literal {
            kind,
            value,
            at: word.at,
            length: word.text.len(),
            place,
        });
    }
    scanned
}

/// What is known of each token before the literals are placed.
struct Places<'a> {
    /// Where each token stands.
    place: Vec<Place>,
    /// Names that stand where constants are wanted.
    names: FxHashSet<&'a str>,
}

fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_' || c == '@')
}

impl<'a> Places<'a> {
    fn of(text: &str, words: &[Word<'a>]) -> Self {
        let preprocessed = preprocessed(text, words);
        let template = template_arguments(words);
        let named = named_constants(words);
        let mut reader = Reader::default();
        let mut places = Self {
            place: Vec::with_capacity(words.len()),
            names: FxHashSet::default(),
        };
        for (number, word) in words.iter().enumerate() {
            let in_line = preprocessed[number] == Preprocessed::Line;
            if in_line {
                reader.line(words, number);
            } else {
                reader.enter(words, number);
            }
            let is_constant = in_line || template[number] || reader.wants_constant();
            // A constant of other constants stays one.
            if (is_constant || named[number] == Some(Declared::Part)) && is_name(word.text) {
                places.names.insert(word.text);
            }
            places.place.push(match named[number] {
                _ if is_constant || preprocessed[number] != Preprocessed::No => Place::Constant,
                Some(Declared::Value(named)) => Place::Named(named),
                Some(Declared::Part) => Place::Constant,
                None if reader.in_function() => Place::Statement {
                    divides: number > 0 && matches!(words[number - 1].text, "/" | "%"),
                },
                None => Place::Constant,
            });
            if !in_line {
                reader.leave(word.text);
            }
        }
        places
    }
}

/// What a token is to the preprocessor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Preprocessed {
    No,
    /// Part of a line that begins with `#`.
    Line,
    /// Between `#if` and `#endif`: two kernels of one program may share it.
    Guarded,
}

fn preprocessed(text: &str, words: &[Word<'_>]) -> Vec<Preprocessed> {
    let bytes = text.as_bytes();
    let (mut line_end, mut depth) = (0, 0_usize);
    let mut found = Vec::with_capacity(words.len());
    for (number, word) in words.iter().enumerate() {
        let starts_line = || {
            let before = &bytes[..word.at];
            let blank = before.iter().rev().take_while(|byte| **byte != b'\n');
            blank.into_iter().all(u8::is_ascii_whitespace)
        };
        if word.text == "#" && word.at >= line_end && starts_line() {
            line_end = line_of(bytes, word.at);
            match words.get(number + 1).map(|next| next.text) {
                Some("if" | "ifdef" | "ifndef") => depth += 1,
                Some("endif") => depth = depth.saturating_sub(1),
                _ => {}
            }
        }
        found.push(match depth {
            _ if word.at < line_end => Preprocessed::Line,
            0 => Preprocessed::No,
            _ => Preprocessed::Guarded,
        });
    }
    found
}

/// The end of the preprocessor line that `at` is in.
fn line_of(bytes: &[u8], mut at: usize) -> usize {
    while at < bytes.len() && (bytes[at] != b'\n' || bytes[at - 1] == b'\\') {
        at += 1;
    }
    at
}

/// Which tokens are arguments of templates: those between `<` behind a name and its `>`, where nothing
/// between them is the end of an expression.
fn template_arguments(words: &[Word<'_>]) -> Vec<bool> {
    let mut found = vec![false; words.len()];
    for open in 1..words.len() {
        if words[open].text != "<" || !is_name(words[open - 1].text) {
            continue;
        }
        let (mut angles, mut rounds) = (1_usize, 0_usize);
        for at in open + 1..words.len() {
            match words[at].text {
                "<" => angles += 1,
                ">" => angles -= 1,
                "(" => rounds += 1,
                ")" if rounds > 0 => rounds -= 1,
                ")" | ";" | "{" | "}" | "?" | "|" | "=" => break,
                "&" if words[at - 1].text == "&" => break,
                _ => {}
            }
            if angles == 0 {
                found[open + 1..at].fill(true);
                break;
            }
        }
    }
    found
}

/// What a token is to the declaration of a constant that it is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Declared {
    /// Its value, a literal.
    Value(Named),
    /// Part of an expression.
    Part,
}

/// Of each token, what it is to a declaration with `constexpr`.
fn named_constants(words: &[Word<'_>]) -> Vec<Option<Declared>> {
    let mut found = vec![None; words.len()];
    for start in 0..words.len() {
        if words[start].text != "constexpr" || words.get(start + 1).is_none_or(|next| next.text == "(") {
            continue;
        }
        let mut end = start + 1;
        while end < words.len() && !matches!(words[end].text, ";" | "{" | "(" | "=") {
            end += 1;
        }
        if words.get(end).is_none_or(|word| word.text != "=") || end < start + 3 {
            continue;
        }
        let value = end + 1;
        let close = words[value..].iter().position(|word| word.text == ";");
        let close = close.map_or(words.len(), |count| value + count);
        let of_names = words[start + 1..end].iter().all(|word| is_name(word.text));
        let is_literal = close == value + 1 && literal(words[value].text).is_some();
        if is_literal && of_names {
            let named = Named {
                type_from: words[start + 1].at,
                type_to: words[end - 2].end(),
                name_to: words[end - 1].end(),
            };
            found[value] = Some(Declared::Value(named));
        } else {
            found[value..close].fill(Some(Declared::Part));
        }
    }
    found
}

/// The brackets that are open at a token.
#[derive(Default)]
struct Reader {
    open: Vec<Open>,
    /// Whether the next loop is unrolled.
    unrolls: bool,
    /// Whether a label is open, up to its `:`.
    label: bool,
    /// What the last pair of `[]` was.
    last_extent: bool,
}

impl Reader {
    /// Looks at a token of a preprocessor line.
    fn line(&mut self, words: &[Word<'_>], number: usize) {
        // With a count, turns are written that often and what is left over has a loop of its own.
        let has_count = || {
            let next = words.get(number + 1);
            next.is_some_and(|next| next.text.starts_with(|c: char| c.is_ascii_digit()))
        };
        if words[number].text == "unroll" && !has_count() {
            self.unrolls = true;
        }
    }

    fn in_function(&self) -> bool {
        self.open.contains(&Open::Body)
    }

    fn wants_constant(&self) -> bool {
        self.label || self.open.contains(&Open::Constant)
    }

    /// Opens the bracket that token `number` is.
    fn enter(&mut self, words: &[Word<'_>], number: usize) {
        let before = |count: usize| {
            let at = number.checked_sub(count);
            at.map_or("", |at| words[at].text)
        };
        match words[number].text {
            "{" => {
                let is_body = self.in_function() || matches!(before(1), ")" | "const" | "noexcept");
                self.open
                    .push(if is_body { Open::Body } else { Open::Transparent });
            }
            "(" => {
                let unrolled = before(1) == "for" && std::mem::take(&mut self.unrolls);
                let constant = unrolled || CONSTANT_CALLS.contains(&before(1));
                self.open
                    .push(if constant { Open::Constant } else { Open::Plain });
            }
            "[" => {
                // `float v[4]` has a type before the name; `return v[4]` has not.
                let declares = match before(1) {
                    "]" => self.last_extent,
                    _ => {
                        is_name(before(1))
                            && (before(2) == ">" || is_name(before(2)))
                            && before(2) != "return"
                    }
                };
                // The parameter `float (&v)[4]`.
                let declares = declares || before(1) == ")";
                self.last_extent = declares;
                self.open
                    .push(if declares { Open::Constant } else { Open::Plain });
            }
            "case" | "enum" => self.label = true,
            _ => {}
        }
    }

    /// Closes the bracket that a token is.
    fn leave(&mut self, word: &str) {
        match word {
            "}" | ")" | "]" => {
                self.open.pop();
                self.label = false;
            }
            ":" | ";" => self.label = false,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free(text: &str) -> Vec<i64> {
        let scanned = scan(text);
        let free = scanned.literals.iter().filter(|it| it.place != Place::Constant);
        free.map(|it| it.value).collect()
    }

    #[test]
    fn numbers_of_statements_are_free() {
        let text = "void f(const float* x, float* y)\n{\nif (threadIdx.x >= 74u) return;\ny[i / 37 * 40 % 41] = x[9] * 0.5f + @_g(42);\n}\n";
        let half = f64::from(0.5_f32).to_bits() as i64;
        assert_eq!(free(text), [74, 37, 40, 41, 9, half, 42]);
        let scanned = scan(text);
        let divides: Vec<i64> = scanned
            .literals
            .iter()
            .filter(|it| it.place == Place::Statement { divides: true })
            .map(|it| it.value)
            .collect();
        assert_eq!(divides, [37, 41]);
    }

    #[test]
    fn what_must_be_a_constant_stays_one() {
        let statements = [
            "kiln_lanes<float, 4> v[3];",
            "kiln_lanes<float, 4> v[3][5];",
            "__shared__ float v[7];",
            "#pragma unroll\nfor (int k = 0; k < 8; k++) {}",
            "#pragma unroll 4\n",
            "#if KILN > 5\n#endif\n",
            "switch (x) { case 3: break; }",
            "static_assert(sizeof(T) == 4);",
            "const float y = kiln_group<kiln_by_sum, 128>(x);",
            "asm(\"mov.u32 %0, 5;\" : \"=r\"(x) : \"n\"(7));",
            "constexpr int AREA = 5 * 6;",
        ];
        for statement in statements {
            let text = format!("void f(int n = 4)\n{{\n{statement}\n}}\n");
            assert_eq!(free(&text), Vec::<i64>::new(), "{statement}");
        }
        assert_eq!(
            free("void f() {\n#pragma unroll\nfor (;;) x = 5;\nfor (int i = 0; i < 6; i++) {}\n}"),
            [5, 0, 6]
        );
        assert_eq!(
            free("void f() {\n#pragma unroll 8\nfor (int i = y; i < 7; i += 32) {}\n}"),
            [7, 32]
        );
        assert_eq!(
            free("#ifndef A\n#define A\nint f() { return 5; }\n#endif\nint g() { return 6; }"),
            [6]
        );
        assert_eq!(
            free("struct A { float at[4]; int f() const { return 5; } };\nenum { B = 6 };"),
            [5]
        );
    }

    #[test]
    fn named_constants_are_free_unless_a_constant_needs_them() {
        let text = "struct @_case { static constexpr int queries = 37; static constexpr int TILE = 64; };\n\
                    namespace n { constexpr Index STRIDE = 5; constexpr int WIDE = 6; constexpr int AREA = WIDE * 2; }\n\
                    template <class C> void f() { float x[C::TILE]; constexpr int ROWS = 9; if (i < C::queries) g(ROWS); }";
        assert_eq!(free(text), [37, 5, 9]);
        let scanned = scan(text);
        let Place::Named(named) = scanned.literals[0].place else {
            panic!("{:?}", scanned.literals[0]);
        };
        assert_eq!(&text[named.type_from..named.type_to], "int");
        assert!(text[..named.name_to].ends_with("queries"));
    }
}
