//! The source tree around the step: every function once, spread over files that compile in parallel.
//!
//! A function is named by a fingerprint of its text, and a file holds functions of one part of the step:
//! its register tiles, the forward pass, the backward pass, the updates. Steps that agree in a part
//! therefore have equal files for it, and the C compiler sees those once ([`kiln_cpu::Objects`]). For
//! example, an optimizer's first step, whose state does not exist yet, differs from the following ones in
//! the updates only.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use kiln_compiler::schedule::Kernel;
use kiln_graph::{Graph, Phase};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::build::SourceFile;
use crate::isa::Isa;
use crate::kernels::{self, Helper};
use crate::policy::FILE_LENGTH;

/// Hexadecimal digits of a fingerprint in a name, unless two functions agree in them.
const DIGITS: usize = 5;

/// A part of the step whose functions share files.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum FileGroup {
    /// Functions that several kernels call.
    Tiles,
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
    /// The optimizer, and operations fused with it.
    Updates,
}

impl FileGroup {
    /// The part that `kernel` belongs to.
    pub fn of(graph: &Graph, kernel: &Kernel) -> Self {
        let phases = kernel.nodes.iter().map(|&node| graph.node(node).provenance.phase);
        let part = phases.map(|phase| match phase {
            Phase::Optimizer => FileGroup::Updates,
            Phase::Backward => FileGroup::Backward,
            _ => FileGroup::Forward,
        });
        part.max().unwrap_or(FileGroup::Forward)
    }

    fn file(self) -> &'static str {
        match self {
            FileGroup::Tiles => "tiles",
            FileGroup::Forward => "forward",
            FileGroup::Backward => "backward",
            FileGroup::Updates => "updates",
        }
    }

    fn comment(self) -> &'static str {
        match self {
            FileGroup::Tiles => "What kernels call in their inner loops.",
            FileGroup::Forward => "Kernels of the forward pass.",
            FileGroup::Backward => "Kernels of the backward pass.",
            FileGroup::Updates => "Kernels with the optimizer's updates.",
        }
    }
}

/// A function as it is written.
struct Function {
    part: FileGroup,
    text: String,
    /// Names of the helpers that it calls.
    helpers: Vec<String>,
}

impl Function {
    /// Whether it comes from a template: functions of templates call helpers, those of loop nests do not.
    /// Loop nests are fused differently where the optimizer has no state yet. They share no files with
    /// templates, so that the files of templates stay equal.
    fn is_from_template(&self) -> bool {
        !self.helpers.is_empty()
    }
}

/// The functions of a step, each text once.
#[derive(Default)]
pub struct Functions {
    functions: Vec<Function>,
    names: FxHashMap<String, String>,
    taken: FxHashSet<String>,
    prototypes: Vec<String>,
    helpers: BTreeMap<String, Helper>,
}

impl Functions {
    /// The name of the function with this text (`@` for the name), which calls `helpers`; `kind` begins a new
    /// name. A function that several parts call is in the part that calls it first.
    pub fn name(
        &mut self,
        kind: &str,
        part: FileGroup,
        text: &str,
        helpers: &[Helper],
        prototype: impl FnOnce(&str) -> String,
    ) -> String {
        if let Some(name) = self.names.get(text) {
            return name.clone();
        }
        let name = self.fresh(kind, text);
        self.names.insert(text.to_owned(), name.clone());
        self.functions.push(Function {
            part,
            text: tidy(&text.replace('@', &name)),
            helpers: helpers.iter().map(|helper| helper.name.clone()).collect(),
        });
        self.prototypes.push(prototype(&name));
        for helper in helpers {
            self.helpers
                .entry(helper.name.clone())
                .or_insert_with(|| helper.clone());
        }
        name
    }

    /// A name that depends on the text alone, unless another function has it.
    fn fresh(&mut self, kind: &str, text: &str) -> String {
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        let digits = format!("{:016x}", hasher.finish());
        let mut names = (DIGITS..=digits.len()).map(|length| format!("{kind}_{}", &digits[..length]));
        let free = |name: &String| !self.taken.contains(name);
        let name = names
            .find(free)
            .unwrap_or_else(|| format!("{kind}_{digits}_{}", self.taken.len()));
        self.taken.insert(name.clone());
        name
    }

    /// Declarations of all named functions, in order of first use.
    pub fn prototypes(&self) -> &[String] {
        &self.prototypes
    }

    /// The files, with the headers that they include.
    pub fn files(&self, isa: Isa) -> Vec<SourceFile> {
        let mut sources = kernels::vector::headers();
        sources.push(SourceFile::new("kiln_nest.h", include_str!("c/kiln_nest.h")));
        sources.push(SourceFile::new("kiln_calls.h", include_str!("c/kiln_calls.h")));
        let tiles: Vec<Function> = self.helpers.values().map(helper).collect();
        let parts = [
            FileGroup::Tiles,
            FileGroup::Forward,
            FileGroup::Backward,
            FileGroup::Updates,
        ];
        let groups = parts.into_iter().flat_map(|part| [(part, true), (part, false)]);
        for (part, from_template) in groups {
            let all = tiles.iter().chain(&self.functions);
            let of_group =
                |function: &&Function| function.part == part && function.is_from_template() == from_template;
            let mut rest: Vec<&Function> = all.filter(of_group).collect();
            let total: usize = rest.iter().map(|function| function.text.len()).sum();
            let most = total.div_ceil(total.div_ceil(FILE_LENGTH).max(1));
            let mut count = 0;
            while !rest.is_empty() {
                let mut length = 0;
                let mut fits = |function: &&&Function| {
                    let fits = length < most;
                    length += function.text.len();
                    fits
                };
                let end = rest.iter().take_while(|function| fits(function)).count();
                let text = self.file(part, isa, &rest[..end]);
                let kind = if from_template { "" } else { "_loops" };
                sources.push(SourceFile::new(format!("{}{kind}_{count}.c", part.file()), text));
                rest.drain(..end);
                count += 1;
            }
        }
        sources
    }

    /// One file. It declares exactly the functions that its functions call.
    fn file(&self, part: FileGroup, isa: Isa, functions: &[&Function]) -> String {
        let mut text = String::new();
        let mut called: Vec<&String> = functions.iter().flat_map(|function| &function.helpers).collect();
        called.sort_unstable();
        called.dedup();
        for helper in called.into_iter().filter_map(|name| self.helpers.get(name)) {
            let _ = writeln!(text, "{}", helper.prototype);
        }
        for function in functions {
            let _ = write!(text, "\n{}", function.text);
        }
        let prelude = kernels::vector::prelude(isa, &text);
        format!(
            "/* {} */\n{prelude}#include \"kiln_nest.h\"\n{text}",
            part.comment()
        )
    }
}

fn helper(helper: &Helper) -> Function {
    Function {
        part: FileGroup::Tiles,
        text: helper.definition.clone(),
        helpers: vec![helper.name.clone()],
    }
}

/// Indents C by its braces.
fn tidy(text: &str) -> String {
    let mut out = String::with_capacity(text.len() * 5 / 4);
    let mut depth = 0usize;
    for line in text.lines() {
        let line = line.trim();
        let closing = line.chars().take_while(|&c| c == '}').count();
        for _ in 0..depth.saturating_sub(closing) {
            out.push_str("    ");
        }
        out.push_str(line);
        out.push('\n');
        for c in line.chars() {
            match c {
                '{' => depth += 1,
                '}' => depth = depth.saturating_sub(1),
                _ => {}
            }
        }
    }
    out
}
