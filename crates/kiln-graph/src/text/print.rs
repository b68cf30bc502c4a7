//! Printing.

use std::fmt::{self, Write};

use super::forms::{self, Attribute, Fields};
use crate::{Graph, NodeData, Provenance, Value};

/// Column at which provenance starts when the line is shorter than that.
const PROVENANCE_COLUMN: usize = 64;

/// Collects the attributes of one node. Its methods are the modes of [`forms`].
#[derive(Default)]
pub(super) struct Writer {
    words: String,
    keys: String,
}

impl Writer {
    pub(super) fn word<T: Attribute>(&mut self, _name: &str, value: &T) {
        self.words.push(' ');
        value.write(&mut self.words);
    }

    pub(super) fn key<T: Attribute>(&mut self, name: &str, value: &T) {
        self.keys.push_str(if self.keys.is_empty() { "" } else { ", " });
        self.keys.push_str(name);
        self.keys.push('=');
        value.write(&mut self.keys);
    }

    pub(super) fn opt<T: Attribute + Default + PartialEq>(&mut self, name: &str, value: &T) {
        if *value != T::default() {
            self.key(name, value);
        }
    }

    pub(super) fn result<T>(&mut self, _name: &str, _value: &T) {}

    pub(super) fn index_type<T>(&mut self, _name: &str, _value: &T) {}

    pub(super) fn fields<T: Fields>(&mut self, _name: &str, value: &T) {
        value.write(self);
    }
}

/// `text` between double quotes, with quotes, backslashes and control characters escaped.
pub(super) fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            c if c.is_control() || c == '\u{2028}' || c == '\u{2029}' => {
                out.push_str(&format!("\\u{{{:x}}}", u32::from(c)));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// Whether a character may stand in an unquoted name or number.
pub(super) fn is_atom(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '+' | '-')
}

/// Whether a character may stand in an unquoted word of a provenance.
pub(super) fn is_provenance_word(c: char) -> bool {
    !c.is_whitespace() && !c.is_control() && c != '"' && c != '#'
}

/// A word of a provenance, quoted if it must be.
fn provenance_word(text: &str) -> String {
    let plain = !text.is_empty()
        && text.chars().all(is_provenance_word)
        && !["at", "in", "chunk", "gradient", "full_precision"].contains(&text);
    if plain { text.to_owned() } else { quoted(text) }
}

fn provenance(p: &Provenance) -> Option<String> {
    if *p == Provenance::default() {
        return None;
    }
    let mut out = p.phase.name().to_owned();
    let parts = [
        ("", &p.operation),
        (" gradient", &p.gradient_of),
        (" at", &p.location),
        (" in", &p.module),
    ];
    for (keyword, part) in parts {
        if let Some(text) = part {
            out.push_str(keyword);
            out.push(' ');
            out.push_str(&provenance_word(text));
        }
    }
    if let Some(chunk) = p.chunk {
        let _ = write!(out, " chunk {chunk}");
    }
    if p.full_precision {
        out.push_str(" full_precision");
    }
    Some(out)
}

fn values(list: &[Value]) -> String {
    let names: Vec<String> = list.iter().map(ToString::to_string).collect();
    names.join(", ")
}

impl Graph {
    /// One node as it stands in the text form, without provenance: `%3 = add %0, %1 : f32[8]`.
    pub fn node_text(&self, node: &NodeData) -> String {
        let mut attributes = Writer::default();
        forms::write(&node.op, &mut attributes);
        let mut line = String::new();
        if !node.outputs.is_empty() {
            line = format!("{} = ", values(&node.outputs));
        }
        line.push_str(node.op.name());
        line.push_str(&attributes.words);
        if !node.inputs.is_empty() {
            line.push(' ');
            line.push_str(&values(&node.inputs));
        }
        if !attributes.keys.is_empty() {
            line.push_str(&format!(" {{{}}}", attributes.keys));
        }
        let types: Vec<String> = node
            .outputs
            .iter()
            .map(|&value| self.ty(value).to_string())
            .collect();
        if !types.is_empty() {
            line.push_str(" : ");
            line.push_str(&types.join(", "));
        }
        line
    }

    /// The text form without name and provenance: equal texts are equal computations.
    pub fn canonical_text(&self) -> String {
        let mut out = String::new();
        self.print(&mut out, false)
            .expect("writing to a string does not fail");
        out
    }

    fn print(&self, out: &mut impl Write, people: bool) -> fmt::Result {
        let name = if people { self.name.as_str() } else { "" };
        let plain = !name.is_empty() && name.chars().all(is_atom);
        writeln!(
            out,
            "graph @{} {{",
            if plain { name.to_owned() } else { quoted(name) }
        )?;
        for (_, node) in self.nodes() {
            let line = self.node_text(node);
            match provenance(&node.provenance).filter(|_| people) {
                Some(origin) => writeln!(out, "  {line:<PROVENANCE_COLUMN$}  ; {origin}")?,
                None => writeln!(out, "  {line}")?,
            }
        }
        write!(out, "  return")?;
        for (position, output) in self.outputs.iter().enumerate() {
            write!(out, "{} {}", if position == 0 { "" } else { "," }, output.value)?;
            if let Some(parameter) = output.alias {
                write!(out, " (alias {parameter})")?;
            }
            if output.check {
                write!(out, " (check)")?;
            }
        }
        writeln!(out, "\n}}")
    }
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.print(f, true)
    }
}

impl fmt::Debug for Graph {
    /// The text form: what a failed assertion should show.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\n")?;
        self.print(f, true)
    }
}
