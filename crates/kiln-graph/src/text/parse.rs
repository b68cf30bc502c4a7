//! Parsing: recursive descent over the characters of the text, one statement a line.
//!
//! A statement is first read as raw parts (words, operands, `key=value` pairs, result types), then
//! [`forms::read`] takes from them what the operation needs, and what is left over is an error. The node is
//! added through [`Graph::add_node`], which types it; the types written must equal the types inferred.

use std::collections::HashMap;
use std::collections::VecDeque;

use smallvec::SmallVec;

use super::forms::{self, Attribute, Fields, FromResults};
use super::print::{is_atom, is_provenance_word};
use crate::{DType, Graph, Output, Phase, Provenance, Shape, TensorType, Value};

/// Why a text is no graph, and where.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("line {line}, column {column}: {message}")]
pub struct ParseError {
    /// Line, counted from 1.
    pub line: usize,
    /// Column in characters, counted from 1.
    pub column: usize,
    /// What was expected or which rule is broken.
    pub message: String,
}

/// An error at a byte offset of the text.
pub(super) struct Fault {
    at: usize,
    message: String,
}

type Parse<T> = Result<T, Fault>;

/// An attribute value before it is known what it should be.
pub(super) enum Raw<'a> {
    /// A bare name or number.
    Atom(&'a str),
    /// A quoted string, escapes resolved.
    Text(String),
    /// Bare names or numbers in brackets.
    List(Vec<&'a str>),
}

struct Key<'a> {
    at: usize,
    name: &'a str,
    value: Raw<'a>,
}

/// The raw parts of one node. Its methods are the modes of [`forms`]; each takes out what it returns.
pub(super) struct Statement<'a> {
    at: usize,
    words: VecDeque<(usize, Raw<'a>)>,
    keys: Vec<Key<'a>>,
    results: Vec<TensorType>,
}

impl Statement<'_> {
    pub(super) fn fault(&self, message: String) -> Fault {
        Fault { at: self.at, message }
    }

    pub(super) fn word<T: Attribute>(&mut self, name: &str) -> Parse<T> {
        let Some((at, raw)) = self.words.pop_front() else {
            return Err(self.fault(format!("expected {} ({name}) after the operation", T::KIND)));
        };
        T::read(&raw).ok_or_else(|| Fault {
            at,
            message: format!("{name}: expected {}", T::KIND),
        })
    }

    fn take<T: Attribute>(&mut self, name: &str) -> Parse<Option<T>> {
        let Some(position) = self.keys.iter().position(|key| key.name == name) else {
            return Ok(None);
        };
        let key = self.keys.remove(position);
        match T::read(&key.value) {
            Some(value) => Ok(Some(value)),
            None => Err(Fault {
                at: key.at,
                message: format!("{name}: expected {}", T::KIND),
            }),
        }
    }

    pub(super) fn key<T: Attribute>(&mut self, name: &str) -> Parse<T> {
        match self.take(name)? {
            Some(value) => Ok(value),
            None => Err(self.fault(format!("attribute `{name}` is missing ({})", T::KIND))),
        }
    }

    pub(super) fn opt<T: Attribute + Default>(&mut self, name: &str) -> Parse<T> {
        self.take(name).map(Option::unwrap_or_default)
    }

    pub(super) fn result<T: FromResults>(&mut self, name: &str) -> Parse<T> {
        T::from_results(&self.results)
            .ok_or_else(|| self.fault(format!("the result type is missing, which gives the {name}")))
    }

    pub(super) fn index_type(&mut self, name: &str) -> Parse<DType> {
        match self.results.get(1) {
            Some(ty) => Ok(ty.dtype),
            None => Err(self.fault(format!(
                "the second result type is missing, which gives the {name}"
            ))),
        }
    }

    pub(super) fn fields<T: Fields>(&mut self, _name: &str) -> Parse<T> {
        T::read(self)
    }

    /// Fails if anything was not taken.
    fn finish(&self) -> Parse<()> {
        if let Some((at, _)) = self.words.front() {
            return Err(Fault {
                at: *at,
                message: "this operation takes no such word".into(),
            });
        }
        match self.keys.first() {
            Some(key) => Err(Fault {
                at: key.at,
                message: format!("unknown or repeated attribute `{}`", key.name),
            }),
            None => Ok(()),
        }
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    graph: Graph,
    names: HashMap<&'a str, Value>,
}

impl Graph {
    /// The graph that `text` describes; see [`crate::text`] for the form.
    ///
    /// # Errors
    ///
    /// With line and column, if the text is malformed, a value is used before its definition or defined
    /// twice, or the operands, attributes or written types of a node break the rules of
    /// [`crate::infer`](mod@crate::infer).
    pub fn parse(text: &str) -> Result<Graph, ParseError> {
        let mut parser = Parser {
            text,
            at: 0,
            graph: Graph::default(),
            names: HashMap::new(),
        };
        match parser.graph() {
            Ok(()) => Ok(parser.graph),
            Err(fault) => {
                let before = &text[..fault.at];
                let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
                Err(ParseError {
                    line: before.matches('\n').count() + 1,
                    column: before[line_start..].chars().count() + 1,
                    message: fault.message,
                })
            }
        }
    }
}

impl<'a> Parser<'a> {
    fn fail<T>(&self, message: impl Into<String>) -> Parse<T> {
        Err(Fault {
            at: self.at,
            message: message.into(),
        })
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// The next character after blanks, which are skipped; none at the end of the line or before a comment.
    fn peek(&mut self) -> Option<char> {
        let rest = self.rest();
        let blanks = rest.len() - rest.trim_start_matches([' ', '\t', '\r']).len();
        self.at += blanks;
        self.rest().chars().next().filter(|&c| c != '\n' && c != '#')
    }

    /// Takes `c` if it comes next.
    fn eat(&mut self, c: char) -> bool {
        let found = self.peek() == Some(c);
        if found {
            self.at += c.len_utf8();
        }
        found
    }

    fn expect(&mut self, c: char) -> Parse<()> {
        if self.eat(c) {
            Ok(())
        } else {
            self.fail(format!("expected `{c}`"))
        }
    }

    /// Skips blank lines and comments.
    fn skip_lines(&mut self) {
        while self.peek().is_none() && self.at < self.text.len() {
            let rest = self.rest();
            self.at += rest.find('\n').map_or(rest.len(), |newline| newline + 1);
        }
    }

    fn end_of_line(&mut self) -> Parse<()> {
        if self.peek().is_some() {
            self.fail("expected the end of the line")
        } else {
            Ok(())
        }
    }

    /// A run of characters of one kind; maybe empty.
    fn run(&mut self, belongs: impl Fn(char) -> bool) -> &'a str {
        self.peek();
        let rest = self.rest();
        let length = rest.find(|c| !belongs(c)).unwrap_or(rest.len());
        self.at += length;
        &rest[..length]
    }

    fn atom(&mut self, what: &str) -> Parse<&'a str> {
        let atom = self.run(is_atom);
        if atom.is_empty() {
            self.fail(format!("expected {what}"))
        } else {
            Ok(atom)
        }
    }

    fn number<T: std::str::FromStr>(&mut self, what: &str) -> Parse<T> {
        self.peek();
        let at = self.at;
        let atom = self.atom(what)?;
        atom.parse().map_err(|_| Fault {
            at,
            message: format!("`{atom}` is not {what}"),
        })
    }

    /// A quoted string; the opening quote comes next.
    fn string(&mut self) -> Parse<String> {
        self.expect('"')?;
        let mut out = String::new();
        let mut chars = self.rest().char_indices();
        while let Some((offset, c)) = chars.next() {
            let bad_escape = Fault {
                at: self.at + offset,
                message: "unknown escape in a string".into(),
            };
            match c {
                '"' => {
                    self.at += offset + 1;
                    return Ok(out);
                }
                '\n' => break,
                '\\' => match chars.next().map(|(_, escaped)| escaped) {
                    Some('n') => out.push('\n'),
                    Some('t') => out.push('\t'),
                    Some('r') => out.push('\r'),
                    Some(same @ ('"' | '\\')) => out.push(same),
                    Some('u') => {
                        let digits: String = chars
                            .by_ref()
                            .map(|(_, c)| c)
                            .skip_while(|&c| c == '{')
                            .take_while(|&c| c != '}')
                            .collect();
                        match u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32) {
                            Some(c) => out.push(c),
                            None => return Err(bad_escape),
                        }
                    }
                    _ => return Err(bad_escape),
                },
                c => out.push(c),
            }
        }
        self.fail("this string does not end on its line")
    }

    /// `%name`: the name.
    fn value_name(&mut self) -> Parse<&'a str> {
        self.expect('%')?;
        self.atom("the name of a value")
    }

    /// `%name`: the value it stands for.
    fn value(&mut self) -> Parse<Value> {
        self.peek();
        let at = self.at;
        let name = self.value_name()?;
        let value = self.names.get(name).copied();
        value.ok_or_else(|| Fault {
            at,
            message: format!("%{name} is not defined above"),
        })
    }

    /// A list of at least one, separated by commas.
    fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> Parse<T>) -> Parse<Vec<T>> {
        let mut items = vec![item(self)?];
        while self.eat(',') {
            items.push(item(self)?);
        }
        Ok(items)
    }

    /// A list in brackets, maybe empty.
    fn bracketed<T>(&mut self, item: impl FnMut(&mut Self) -> Parse<T>) -> Parse<Vec<T>> {
        self.expect('[')?;
        if self.eat(']') {
            return Ok(Vec::new());
        }
        let items = self.list(item)?;
        self.expect(']')?;
        Ok(items)
    }

    fn ty(&mut self) -> Parse<TensorType> {
        self.peek();
        let at = self.at;
        let name = self.atom("an element type")?;
        let dtype: DType = name.parse().map_err(|error| Fault {
            at,
            message: format!("{error}"),
        })?;
        let dims = self.bracketed(|parser| parser.number::<usize>("an extent"))?;
        let ty = TensorType {
            dtype,
            shape: Shape::from(dims),
        };
        if ty.fits_memory() {
            Ok(ty)
        } else {
            Err(Fault {
                at,
                message: format!("{ty} is larger than any memory"),
            })
        }
    }

    fn raw(&mut self) -> Parse<Raw<'a>> {
        match self.peek() {
            Some('"') => self.string().map(Raw::Text),
            Some('[') => self.bracketed(|parser| parser.atom("a number")).map(Raw::List),
            _ => self.atom("a value").map(Raw::Atom),
        }
    }

    fn graph(&mut self) -> Parse<()> {
        self.skip_lines();
        if self.run(is_atom) != "graph" {
            self.at = 0;
            return self.fail("expected `graph @name {`");
        }
        self.expect('@')?;
        self.graph.name = match self.peek() {
            Some('"') => self.string()?,
            _ => self.atom("the name of the graph")?.to_owned(),
        };
        self.expect('{')?;
        self.end_of_line()?;
        loop {
            self.skip_lines();
            match self.peek() {
                None => return self.fail("expected `return` before the end of the text"),
                Some('%') => self.node()?,
                Some('}') => return self.fail("expected `return` before the end of the graph"),
                Some(_) if self.at_return() => break,
                Some(_) => self.node()?,
            }
        }
        self.returns()?;
        self.skip_lines();
        self.expect('}')?;
        self.skip_lines();
        if self.peek().is_some() {
            self.fail("expected nothing after the graph")
        } else {
            Ok(())
        }
    }

    fn at_return(&mut self) -> bool {
        let start = self.at;
        let found = self.run(is_atom) == "return";
        if !found {
            self.at = start;
        }
        found
    }

    fn returns(&mut self) -> Parse<()> {
        if self.peek().is_none() {
            return Ok(());
        }
        let outputs = self.list(|parser| {
            let value = parser.value()?;
            let mut output = Output {
                value,
                alias: None,
                check: false,
            };
            while parser.eat('(') {
                match parser.atom("`alias` or `check`")? {
                    "alias" => output.alias = Some(parser.number::<u32>("the number of a parameter")?),
                    "check" => output.check = true,
                    _ => return parser.fail("expected `(alias N)` or `(check)`"),
                }
                parser.expect(')')?;
            }
            Ok(output)
        })?;
        self.graph.outputs.extend(outputs);
        self.end_of_line()
    }

    fn node(&mut self) -> Parse<()> {
        let mut names = Vec::new();
        if self.peek() == Some('%') {
            names = self.list(|parser| {
                parser.peek();
                Ok((parser.at, parser.value_name()?))
            })?;
            self.expect('=')?;
        }
        self.peek();
        let at = self.at;
        let mnemonic = self.atom("an operation")?;
        let mut statement = Statement {
            at,
            words: VecDeque::new(),
            keys: Vec::new(),
            results: Vec::new(),
        };
        while self.peek().is_some_and(|c| is_atom(c) || c == '"') {
            statement.words.push_back((self.at, self.raw()?));
        }
        let mut inputs = Vec::new();
        if self.peek() == Some('%') {
            inputs = self.list(Self::value)?;
        }
        if self.eat('{') && !self.eat('}') {
            statement.keys = self.list(|parser| {
                parser.peek();
                let at = parser.at;
                let name = parser.atom("the name of an attribute")?;
                parser.expect('=')?;
                Ok(Key {
                    at,
                    name,
                    value: parser.raw()?,
                })
            })?;
            self.expect('}')?;
        }
        if self.eat(':') {
            statement.results = self.list(Self::ty)?;
        }
        let provenance = if self.eat(';') {
            self.provenance()?
        } else {
            Provenance::default()
        };
        self.end_of_line()?;

        let op = forms::read(mnemonic, &mut statement)?;
        statement.finish()?;
        let written = statement.results;
        let outputs = self
            .graph
            .add_node(op, &inputs, provenance)
            .map_err(|error| Fault {
                at,
                message: error.to_string(),
            })?;
        let inferred: SmallVec<[&TensorType; 2]> =
            outputs.iter().map(|&value| self.graph.ty(value)).collect();
        if !inferred.iter().copied().eq(written.iter()) {
            return Err(Fault {
                at,
                message: format!("the result types are {inferred:?}, not {written:?}"),
            });
        }
        if names.len() != outputs.len() {
            let message = format!(
                "`{mnemonic}` has {} results, {} are named",
                outputs.len(),
                names.len()
            );
            return Err(Fault { at, message });
        }
        for ((at, name), value) in names.into_iter().zip(outputs) {
            if self.names.insert(name, value).is_some() {
                return Err(Fault {
                    at,
                    message: format!("%{name} is defined twice"),
                });
            }
        }
        Ok(())
    }

    /// A word of a provenance, and whether it was quoted (then it is no keyword).
    fn provenance_word(&mut self) -> Parse<(String, bool)> {
        if self.peek() == Some('"') {
            return Ok((self.string()?, true));
        }
        let word = self.run(is_provenance_word);
        if word.is_empty() {
            self.fail("expected a word")
        } else {
            Ok((word.to_owned(), false))
        }
    }

    /// What follows the semicolon.
    fn provenance(&mut self) -> Parse<Provenance> {
        self.peek();
        let at = self.at;
        let (word, _) = self.provenance_word()?;
        let Some(phase) = Phase::from_name(&word) else {
            let message = "expected a phase (-, fwd, bwd, opt) after the semicolon; comments start with `#`";
            return Err(Fault {
                at,
                message: message.into(),
            });
        };
        let mut provenance = Provenance {
            phase,
            ..Provenance::default()
        };
        while self.peek().is_some() {
            let at = self.at;
            let (word, quoted) = self.provenance_word()?;
            if word == "chunk" && !quoted {
                let (number, _) = self.provenance_word()?;
                provenance.chunk = Some(number.parse().map_err(|_| Fault {
                    at,
                    message: format!("expected the number of a chunk, not `{number}`"),
                })?);
                continue;
            }
            if word == "full_precision" && !quoted {
                provenance.full_precision = true;
                continue;
            }
            let (slot, text) = match word.as_str() {
                "gradient" if !quoted => (&mut provenance.gradient_of, self.provenance_word()?.0),
                "at" if !quoted => (&mut provenance.location, self.provenance_word()?.0),
                "in" if !quoted => (&mut provenance.module, self.provenance_word()?.0),
                _ => (&mut provenance.operation, word),
            };
            if slot.replace(text.into()).is_some() {
                return Err(Fault {
                    at,
                    message: "a part of the provenance is given twice".into(),
                });
            }
        }
        Ok(provenance)
    }
}
