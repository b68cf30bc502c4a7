//! C text as tokens, and which function of the text each stands in.

use kiln_family::text::{Kind, literal, words};

/// A literal of a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Literal {
    /// Its kind.
    pub kind: Kind,
    /// Its value: the integer, or the bits of the number as an `f64`.
    pub value: i64,
    /// Its first byte.
    pub at: usize,
    /// Its length in bytes.
    pub length: usize,
    /// Where it stands.
    pub place: LiteralPlace,
}

/// Where a literal stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LiteralPlace {
    /// In the body of the function with this number, where a variable can stand for it.
    Body(usize),
    /// Where C wants a constant.
    Constant,
}

/// A function definition of a text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Definition {
    /// The first byte of its name.
    pub name: usize,
    /// The byte behind the `(` of its parameters.
    pub parameters: usize,
    /// The byte behind the `{` of its body.
    pub body: usize,
    /// Names among its parameters.
    pub names: Vec<String>,
}

/// A word of a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Token<'a> {
    /// A number; its place among the literals.
    Literal(usize),
    /// Anything else.
    Other {
        /// The token.
        text: &'a str,
        /// Its first byte.
        at: usize,
    },
}

/// A text in tokens. Comments and white space are none.
#[derive(Debug)]
pub struct Scanned<'a> {
    /// All tokens.
    pub tokens: Vec<Token<'a>>,
    /// The literals among them.
    pub literals: Vec<Literal>,
    /// The functions that are defined.
    pub definitions: Vec<Definition>,
    /// The tokens `static` inside of functions, as `(first byte, end of the declaration)`.
    pub statics: Vec<(usize, usize)>,
}

/// Reads a text that the emitter wrote.
pub fn scan(text: &str) -> Scanned<'_> {
    let mut scanned = Scanned {
        tokens: Vec::with_capacity(text.len() / 3),
        literals: Vec::new(),
        definitions: Vec::new(),
        statics: Vec::new(),
    };
    let mut reader = Reader {
        depth: 0,
        round: 0,
        opened: 0,
        name: 0,
        names: Vec::new(),
        function: None,
        constant: false,
        static_from: None,
        brackets: 0,
    };
    for word in words(text) {
        reader.token(&mut scanned, word.text, word.at, word.end());
    }
    scanned
}

struct Reader {
    /// Open braces.
    depth: usize,
    /// Open parentheses outside of functions.
    round: usize,
    /// The byte behind the last `(` that was opened outside of functions.
    opened: usize,
    /// The first byte of the word before it.
    name: usize,
    /// Words since then.
    names: Vec<String>,
    /// The function whose body is open.
    function: Option<usize>,
    /// Whether a constant expression is open, up to the next `:` or `;`.
    constant: bool,
    /// Where a `static` declaration of the body began: its first byte, and the number of tokens before it.
    static_from: Option<(usize, usize)>,
    /// Literals before the last row of `[..]` began.
    brackets: usize,
}

/// Whether the last of `tokens` are these.
fn ends_with(tokens: &[Token<'_>], words: &[&str]) -> bool {
    let is = |(token, word): (&Token<'_>, &&str)| matches!(token, Token::Other { text, .. } if text == word);
    tokens.len() >= words.len() && tokens[tokens.len() - words.len()..].iter().zip(words).all(is)
}

/// Whether everything that a declaration declares has a value there.
fn have_values(declaration: &[Token<'_>]) -> bool {
    let (mut depth, mut has_value) = (0, false);
    for token in declaration {
        let Token::Other { text, .. } = token else {
            continue;
        };
        match *text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            "=" => has_value = true,
            "," if depth == 0 && !has_value => return false,
            "," if depth == 0 => has_value = false,
            _ => {}
        }
    }
    has_value
}

impl Reader {
    fn token<'a>(&mut self, scanned: &mut Scanned<'a>, word: &'a str, at: usize, end: usize) {
        if let Some((kind, value)) = literal(word) {
            let place = match self.function {
                Some(function) if !self.constant => LiteralPlace::Body(function),
                _ => LiteralPlace::Constant,
            };
            scanned.tokens.push(Token::Literal(scanned.literals.len()));
            scanned.literals.push(Literal {
                kind,
                value,
                at,
                length: end - at,
                place,
            });
            return;
        }
        match word {
            "{" => {
                let is_body =
                    self.depth == 0 && matches!(scanned.tokens.last(), Some(Token::Other { text: ")", .. }));
                if is_body {
                    self.function = Some(scanned.definitions.len());
                    self.constant = false;
                    scanned.definitions.push(Definition {
                        name: self.name,
                        parameters: self.opened,
                        body: end,
                        names: std::mem::take(&mut self.names),
                    });
                }
                self.depth += 1;
                if ends_with(&scanned.tokens, &["]", "="]) {
                    // C initialises no array of a variable size.
                    for literal in &mut scanned.literals[self.brackets..] {
                        literal.place = LiteralPlace::Constant;
                    }
                }
            }
            "[" if !ends_with(&scanned.tokens, &["]"]) => self.brackets = scanned.literals.len(),
            "}" => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth == 0 {
                    self.function = None;
                    self.constant = false;
                }
            }
            "(" if self.depth == 0 => {
                self.round += 1;
                if self.round == 1 {
                    self.opened = end;
                    self.name = match scanned.tokens.last() {
                        Some(Token::Other { at, .. }) => *at,
                        _ => at,
                    };
                    self.names.clear();
                }
            }
            ")" if self.depth == 0 => self.round = self.round.saturating_sub(1),
            "case" | "__attribute__" | "_Alignas" | "#" => self.constant = true,
            "static" if self.function.is_some() => self.static_from = Some((at, scanned.tokens.len())),
            ":" => self.constant = false,
            ";" => {
                self.constant = false;
                if let Some((from, tokens)) = self.static_from.take() {
                    scanned.statics.push((from, end));
                    let declaration = &scanned.tokens[tokens..];
                    if !have_values(declaration) {
                        // Only an object that is static is zero without a value.
                        for token in declaration {
                            if let Token::Literal(number) = token {
                                scanned.literals[*number].place = LiteralPlace::Constant;
                            }
                        }
                    }
                }
            }
            _ if self.depth == 0 => self.names.push(word.to_owned()),
            _ => {}
        }
        scanned.tokens.push(Token::Other { text: word, at });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_have_a_kind_and_a_function() {
        let text = "struct @_args { float x[3]; };\n/* of 17 */ static void f(int a) { static const int t[] = {4}; g(5, 0.5f, 2.5, \
                    6u, 0x7, \"8\", INT64_C(11)); int b[12][13] = {14}, c[15]; }\nvoid @(void *ctx) { switch (x) { case 9: return 10; } }";
        let scanned = scan(text);
        let found: Vec<(Kind, f64, LiteralPlace)> = scanned
            .literals
            .iter()
            .map(|it| {
                let value = match it.kind {
                    Kind::Integer | Kind::Long => it.value as f64,
                    _ => f64::from_bits(it.value as u64),
                };
                (it.kind, value, it.place)
            })
            .collect();
        assert_eq!(
            found,
            [
                (Kind::Integer, 3.0, LiteralPlace::Constant),
                (Kind::Integer, 4.0, LiteralPlace::Body(0)),
                (Kind::Integer, 5.0, LiteralPlace::Body(0)),
                (Kind::Float, 0.5, LiteralPlace::Body(0)),
                (Kind::Double, 2.5, LiteralPlace::Body(0)),
                (Kind::Long, 11.0, LiteralPlace::Body(0)),
                (Kind::Integer, 12.0, LiteralPlace::Constant),
                (Kind::Integer, 13.0, LiteralPlace::Constant),
                (Kind::Integer, 14.0, LiteralPlace::Body(0)),
                (Kind::Integer, 15.0, LiteralPlace::Body(0)),
                (Kind::Integer, 9.0, LiteralPlace::Constant),
                (Kind::Integer, 10.0, LiteralPlace::Body(1)),
            ]
        );
        assert_eq!(scanned.definitions.len(), 2);
        assert!(text[scanned.definitions[0].parameters..].starts_with("int a"));
        assert_eq!(scanned.definitions[1].names, ["void", "*", "ctx"]);
        assert!(text[scanned.definitions[1].name..].starts_with("@(void"));
        assert_eq!(scanned.statics.len(), 1);
    }

    #[test]
    fn what_is_zero_because_it_is_static_does_not_vary() {
        let text = "void f(void) { static const int a[] = {1, 2}, b = g(3, 4); static int c[5]; static int d = 6, e[7]; int h = 8; }";
        let scanned = scan(text);
        let vary = scanned
            .literals
            .iter()
            .map(|it| it.place == LiteralPlace::Body(0));
        assert_eq!(
            vary.collect::<Vec<_>>(),
            [true, true, true, true, false, false, false, true]
        );
    }
}
