//! The part of Python's pickle format that state dictionaries need.
//!
//! A pickle is a program for a small stack machine that builds objects. This interpreter builds plain values
//! and runs nothing: a name of a class or function stays a name ([`Node::Global`]), a call of one stays a
//! call ([`Node::Call`]), and what it means is decided by the reader of the result. Values live in an arena
//! and refer to each other by number, as the format's own memo does, so shared and nested values cost no
//! copies and no recursion. What they hold together is bounded by the pickle's length ([`BYTES_A_BYTE`]).

use std::fmt;
use std::rc::Rc;

/// Most bytes of values that a byte of a pickle may make: the smallest instruction makes a value.
const BYTES_A_BYTE: usize = 64;

/// Most bytes of a module's and a name's text; Python's have no more in practice.
const LONGEST_NAME: usize = 1024;

/// A value's number in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Id(u32);

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Node {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(Rc<str>),
    Bytes(Vec<u8>),
    Tuple(Vec<Id>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    /// A class or function, by module and name.
    Global(Rc<str>, Rc<str>),
    /// `function(*arguments)`; for objects that are made in another way, the arguments that made them.
    Call(Id, Id),
    /// A reference to something outside of the pickle.
    Persistent(Id),
}

/// All values of a pickle.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    nodes: Vec<Node>,
    /// Bytes that the values may still take.
    budget: usize,
}

impl Arena {
    pub fn get(&self, id: Id) -> &Node {
        // Ids are made by `add` only.
        &self.nodes[id.0 as usize]
    }

    /// Classes and functions that the pickle calls, by module and name.
    pub fn called(&self) -> impl Iterator<Item = (&str, &str)> {
        self.nodes.iter().filter_map(|node| match node {
            Node::Call(function, _) => match self.get(*function) {
                Node::Global(module, name) => Some((&**module, &**name)),
                _ => None,
            },
            _ => None,
        })
    }

    /// References to something outside of the pickle.
    pub fn references(&self) -> impl Iterator<Item = Id> {
        let numbered = (0..).map(Id).zip(&self.nodes);
        numbered.filter_map(|(id, node)| matches!(node, Node::Persistent(_)).then_some(id))
    }

    fn add(&mut self, node: Node) -> Result<Id, PickleError> {
        let held = match &node {
            Node::Bytes(bytes) => bytes.len(),
            Node::Tuple(items) | Node::List(items) => size_of_val(&**items),
            Node::Dict(entries) => size_of_val(&**entries),
            // Texts are as long as the instruction that has them, and names share them.
            _ => 0,
        };
        self.spend(size_of::<Node>() + held)?;
        let number = u32::try_from(self.nodes.len()).map_err(|_| PickleError::new("too many values"))?;
        self.nodes.push(node);
        Ok(Id(number))
    }

    /// Takes note of `bytes` more.
    fn spend(&mut self, bytes: usize) -> Result<(), PickleError> {
        let left = self.budget.checked_sub(bytes);
        self.budget = left.ok_or_else(|| {
            PickleError::new(
                "its values take far more memory than the pickle is long, which those of checkpoints do not",
            )
        })?;
        Ok(())
    }

    pub fn text(&self, id: Id) -> Option<&str> {
        match self.get(id) {
            Node::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn int(&self, id: Id) -> Option<i64> {
        match self.get(id) {
            Node::Int(n) => Some(*n),
            _ => None,
        }
    }

    /// The items of a tuple or list.
    pub fn items(&self, id: Id) -> Option<&[Id]> {
        match self.get(id) {
            Node::Tuple(items) | Node::List(items) => Some(items),
            _ => None,
        }
    }

    /// A tuple or list of sizes.
    pub fn sizes(&self, id: Id) -> Option<Vec<usize>> {
        self.items(id)?
            .iter()
            .map(|&item| usize::try_from(self.int(item)?).ok())
            .collect()
    }
}

/// A fault of a pickle, and its place.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PickleError(String);

impl PickleError {
    fn new(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }
}

impl fmt::Display for PickleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pickle: {}", self.0)
    }
}

/// Reads one pickle from the front of `bytes`; returns its values, the result, and the number of bytes it
/// took.
pub(crate) fn read(bytes: &[u8]) -> Result<(Arena, Id, usize), PickleError> {
    let mut machine = Machine {
        bytes,
        at: 0,
        arena: Arena {
            nodes: vec![],
            budget: bytes.len().saturating_mul(BYTES_A_BYTE),
        },
        stack: vec![],
        marks: vec![],
        memo: vec![],
    };
    let result = machine
        .run()
        .map_err(|error| PickleError(format!("{} at byte {}", error.0, machine.at)))?;
    Ok((machine.arena, result, machine.at))
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    arena: Arena,
    stack: Vec<Id>,
    /// Heights of the stack at the open marks.
    marks: Vec<usize>,
    memo: Vec<Option<Id>>,
}

impl<'a> Machine<'a> {
    fn run(&mut self) -> Result<Id, PickleError> {
        loop {
            let opcode = self.byte()?;
            if opcode == b'.' {
                return self.pop();
            }
            self.step(opcode)?;
        }
    }

    /// One instruction, by its character in the format's definition.
    fn step(&mut self, opcode: u8) -> Result<(), PickleError> {
        let known = self.atom(opcode)?
            || self.container(opcode)?
            || self.reference(opcode)?
            || self.bookkeeping(opcode)?;
        match known {
            true => Ok(()),
            false => Err(PickleError::new(format!(
                "instruction 0x{opcode:02x}, which state dictionaries lack"
            ))),
        }
    }

    /// Numbers, texts and bytes; false if the instruction is another one.
    fn atom(&mut self, opcode: u8) -> Result<bool, PickleError> {
        match opcode {
            b'N' => self.push(Node::None)?,
            0x88 => self.push(Node::Bool(true))?,
            0x89 => self.push(Node::Bool(false))?,
            b'J' => {
                let value = i32::from_le_bytes(self.array()?);
                self.push(Node::Int(i64::from(value)))?;
            }
            b'K' => {
                let value = self.byte()?;
                self.push(Node::Int(i64::from(value)))?;
            }
            b'M' => {
                let value = u16::from_le_bytes(self.array()?);
                self.push(Node::Int(i64::from(value)))?;
            }
            0x8a => {
                let length = usize::from(self.byte()?);
                self.long(length)?;
            }
            b'G' => {
                let value = f64::from_be_bytes(self.array()?);
                self.push(Node::Float(value))?;
            }
            // Texts and bytes, with lengths of 1, 4 and 8 bytes.
            0x8c => self.sized_text(1)?,
            b'X' => self.sized_text(4)?,
            0x8d => self.sized_text(8)?,
            b'C' | b'U' => self.sized_bytes(1)?,
            b'B' | b'T' => self.sized_bytes(4)?,
            0x8e | 0x96 => self.sized_bytes(8)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Lists, tuples and dictionaries; false if the instruction is another one.
    fn container(&mut self, opcode: u8) -> Result<bool, PickleError> {
        match opcode {
            b'}' => self.push(Node::Dict(vec![]))?,
            b']' | 0x8f => self.push(Node::List(vec![]))?,
            b')' => self.push(Node::Tuple(vec![]))?,
            b'(' => self.marks.push(self.stack.len()),
            b't' => {
                let items = self.pop_mark()?;
                self.push(Node::Tuple(items))?;
            }
            b'l' => {
                let items = self.pop_mark()?;
                self.push(Node::List(items))?;
            }
            b'd' => {
                let items = self.pop_mark()?;
                let pairs = pairs(&items)?;
                self.push(Node::Dict(pairs))?;
            }
            0x85..=0x87 => {
                let count = usize::from(opcode - 0x84);
                let from = self.floor(count)?;
                let items = self.stack.split_off(from);
                self.push(Node::Tuple(items))?;
            }
            b'a' => {
                let item = self.pop()?;
                self.extend_list(vec![item])?;
            }
            b'e' | 0x90 => {
                let items = self.pop_mark()?;
                self.extend_list(items)?;
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.extend_dict(vec![(key, value)])?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                let pairs = pairs(&items)?;
                self.extend_dict(pairs)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Names, calls, and what stands in other files; false if the instruction is another one.
    fn reference(&mut self, opcode: u8) -> Result<bool, PickleError> {
        match opcode {
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.global(module, name)?;
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                match (self.arena.get(module), self.arena.get(name)) {
                    (Node::Text(module), Node::Text(name)) => {
                        let (module, name) = (module.clone(), name.clone());
                        self.global(module, name)?;
                    }
                    _ => return Err(PickleError::new("a name that is not text")),
                }
            }
            b'R' | 0x81 => {
                let (arguments, function) = (self.pop()?, self.pop()?);
                self.call(function, arguments)?;
            }
            // BUILD sets attributes, which no value here has; the dictionaries' own (`_metadata`) are not
            // needed.
            b'b' => drop(self.pop()?),
            b'Q' => {
                let what = self.pop()?;
                self.push(Node::Persistent(what))?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Announcements, the memo and the stack; false if the instruction is another one.
    fn bookkeeping(&mut self, opcode: u8) -> Result<bool, PickleError> {
        match opcode {
            // PROTO and FRAME only announce.
            0x80 => drop(self.byte()?),
            0x95 => drop(self.take(8)?),
            b'q' => {
                let index = usize::from(self.byte()?);
                self.memoize(index)?;
            }
            b'r' => {
                let index = u32::from_le_bytes(self.array()?) as usize;
                self.memoize(index)?;
            }
            0x94 => self.memoize(self.memo.len())?,
            b'h' => {
                let index = usize::from(self.byte()?);
                self.recall(index)?;
            }
            b'j' => {
                let index = u32::from_le_bytes(self.array()?) as usize;
                self.recall(index)?;
            }
            b'0' => drop(self.pop()?),
            b'1' => drop(self.pop_mark()?),
            b'2' => {
                let top = self.top()?;
                self.stack.push(top);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// A call. Dictionaries are made by calling `OrderedDict`, and filled later, so they must be dictionaries
    /// at once.
    fn call(&mut self, function: Id, arguments: Id) -> Result<(), PickleError> {
        let node = match self.arena.get(function) {
            Node::Global(module, name) if &**module == "collections" && &**name == "OrderedDict" => {
                let lists = self.arena.items(arguments).unwrap_or_default();
                let lists = lists.iter().filter_map(|&pairs| self.arena.items(pairs));
                // One list of pairs may stand in any number of calls, so it is paid for before it is copied.
                let count: usize = lists.clone().map(<[Id]>::len).sum();
                let pairs = lists
                    .flatten()
                    .copied()
                    .take(self.arena.budget / size_of::<(Id, Id)>());
                let mut entries = Vec::new();
                for pair in pairs {
                    match self.arena.items(pair) {
                        Some(&[key, value]) => entries.push((key, value)),
                        _ => return Err(PickleError::new("an OrderedDict of something else than pairs")),
                    }
                }
                self.arena
                    .spend((count - entries.len()).saturating_mul(size_of::<(Id, Id)>()))?;
                Node::Dict(entries)
            }
            _ => Node::Call(function, arguments),
        };
        self.push(node)
    }

    fn byte(&mut self) -> Result<u8, PickleError> {
        let [byte] = self.array()?;
        Ok(byte)
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], PickleError> {
        let end = self.at.checked_add(length).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or_else(|| PickleError::new("it ends in the middle"))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], PickleError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn line(&mut self) -> Result<Rc<str>, PickleError> {
        let rest = &self.bytes[self.at..];
        let length = rest
            .iter()
            .position(|&b| b == b'\n')
            .ok_or_else(|| PickleError::new("it ends in a name"))?;
        let line = self.take(length)?;
        self.at += 1;
        let name = str::from_utf8(line).map_err(|_| PickleError::new("a name that is not UTF-8"))?;
        Ok(name.into())
    }

    fn global(&mut self, module: Rc<str>, name: Rc<str>) -> Result<(), PickleError> {
        if module.len().max(name.len()) > LONGEST_NAME {
            return Err(PickleError::new(format!(
                "a name of more than {LONGEST_NAME} bytes"
            )));
        }
        self.push(Node::Global(module, name))
    }

    /// A length of `width` bytes and as many bytes as it says.
    fn sized(&mut self, width: usize) -> Result<&'a [u8], PickleError> {
        let length = self
            .take(width)?
            .iter()
            .rev()
            .fold(0u64, |n, &b| n << 8 | u64::from(b));
        self.take(usize::try_from(length).map_err(|_| PickleError::new("a length beyond memory"))?)
    }

    fn sized_text(&mut self, width: usize) -> Result<(), PickleError> {
        let bytes = self.sized(width)?;
        let text = str::from_utf8(bytes).map_err(|_| PickleError::new("text that is not UTF-8"))?;
        self.push(Node::Text(text.into()))
    }

    fn sized_bytes(&mut self, width: usize) -> Result<(), PickleError> {
        let bytes = self.sized(width)?;
        // Protocol 2 writes texts of Python 2 as bytes.
        self.push(match str::from_utf8(bytes) {
            Ok(text) => Node::Text(text.into()),
            Err(_) => Node::Bytes(bytes.to_vec()),
        })
    }

    /// A little-endian integer in two's complement. PyTorch's magic number has ten bytes, so long ones stay
    /// bytes.
    fn long(&mut self, length: usize) -> Result<(), PickleError> {
        let bytes = self.take(length)?;
        if length > 8 {
            return self.push(Node::Bytes(bytes.to_vec()));
        }
        let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
        let mut wide = [if negative { 0xff } else { 0 }; 8];
        wide[..length].copy_from_slice(bytes);
        self.push(Node::Int(i64::from_le_bytes(wide)))
    }

    fn push(&mut self, node: Node) -> Result<(), PickleError> {
        let id = self.arena.add(node)?;
        self.stack.push(id);
        Ok(())
    }

    /// The height of the stack below `count` values, which must lie above the last mark.
    fn floor(&self, count: usize) -> Result<usize, PickleError> {
        let lowest = self.marks.last().copied().unwrap_or(0);
        let floor = self
            .stack
            .len()
            .checked_sub(count)
            .filter(|&floor| floor >= lowest);
        floor.ok_or_else(|| PickleError::new("an instruction without its operands"))
    }

    fn top(&self) -> Result<Id, PickleError> {
        Ok(self.stack[self.floor(1)?])
    }

    fn pop(&mut self) -> Result<Id, PickleError> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn pop_mark(&mut self) -> Result<Vec<Id>, PickleError> {
        let mark = self
            .marks
            .pop()
            .ok_or_else(|| PickleError::new("no mark where one is needed"))?;
        // Nothing is popped below a mark, so it is not above the stack.
        Ok(self.stack.split_off(mark))
    }

    fn extend_list(&mut self, items: Vec<Id>) -> Result<(), PickleError> {
        let list = self.top()?;
        match &mut self.arena.nodes[list.0 as usize] {
            Node::List(list) => list.extend(items),
            // An item added to an object of a class: not needed, and not an error of the format.
            Node::Call(..) => {}
            _ => return Err(PickleError::new("items added to something that is not a list")),
        }
        Ok(())
    }

    fn extend_dict(&mut self, pairs: Vec<(Id, Id)>) -> Result<(), PickleError> {
        let dict = self.top()?;
        match &mut self.arena.nodes[dict.0 as usize] {
            Node::Dict(dict) => dict.extend(pairs),
            Node::Call(..) => {}
            _ => {
                return Err(PickleError::new(
                    "entries added to something that is not a dictionary",
                ));
            }
        }
        Ok(())
    }

    fn memoize(&mut self, index: usize) -> Result<(), PickleError> {
        // Writers number the memo from 0 on; an index far beyond would only reserve memory.
        if index > self.at {
            return Err(PickleError::new("a memo index beyond the number of values"));
        }
        let top = self.top()?;
        if self.memo.len() <= index {
            self.memo.resize(index + 1, None);
        }
        self.memo[index] = Some(top);
        Ok(())
    }

    fn recall(&mut self, index: usize) -> Result<(), PickleError> {
        let id = self.memo.get(index).copied().flatten();
        self.stack
            .push(id.ok_or_else(|| PickleError::new(format!("memo entry {index} was never set")))?);
        Ok(())
    }
}

fn pairs(items: &[Id]) -> Result<Vec<(Id, Id)>, PickleError> {
    let (pairs, rest) = items.as_chunks::<2>();
    if rest.is_empty() {
        Ok(pairs.iter().map(|&[key, value]| (key, value)).collect())
    } else {
        Err(PickleError::new("a key without a value"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_dictionary_with_shared_values() {
        // pickle.dumps({"a": [1, -2, 300], "b": (None, True, 2.5)}, protocol=2), with a memo reference added.
        let bytes = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xffM,\x01e\
                      X\x01\x00\x00\x00bq\x03N\x88G@\x04\x00\x00\x00\x00\x00\x00\x87q\x04X\x01\x00\x00\x00ch\x02u.rest";
        let (arena, root, length) = read(bytes).unwrap();
        assert_eq!(&bytes[length..], b"rest");
        let Node::Dict(entries) = arena.get(root) else {
            panic!()
        };
        let keys: Vec<_> = entries.iter().map(|(key, _)| arena.text(*key).unwrap()).collect();
        assert_eq!(keys, ["a", "b", "c"]);
        let ints = |id| {
            arena
                .items(id)
                .unwrap()
                .iter()
                .map(|&i| arena.int(i).unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(ints(entries[0].1), [1, -2, 300]);
        assert_eq!(entries[0].1, entries[2].1, "one value, not a copy");
        let tuple = arena.items(entries[1].1).unwrap();
        assert_eq!(
            (arena.get(tuple[0]), arena.get(tuple[2])),
            (&Node::None, &Node::Float(2.5))
        );
        assert_eq!(arena.sizes(entries[0].1), None, "a negative number is no size");
    }

    #[test]
    fn nothing_is_called() {
        // A pickle that would run a shell command in Python.
        let (arena, root, _) = read(b"cposix\nsystem\n(X\x04\x00\x00\x00echotR.").unwrap();
        let Node::Call(function, _) = arena.get(root) else {
            panic!()
        };
        assert_eq!(
            arena.get(*function),
            &Node::Global("posix".into(), "system".into())
        );
    }

    /// Two bytes each would otherwise copy a long list.
    #[test]
    fn shared_values_are_bounded() {
        let pairs = b"\x80\x02](".to_vec();
        let pairs = [
            pairs,
            b"NN\x86".repeat(5000),
            b"eq\x00\x85q\x010ccollections\nOrderedDict\nq\x020".to_vec(),
        ];
        let program = |count: usize| [pairs.concat(), b"h\x02h\x01R0".repeat(count), b"}.".to_vec()].concat();
        assert!(read(&program(1)).is_ok());
        let error = read(&program(1000)).unwrap_err().to_string();
        assert!(error.contains("more memory"), "{error}");
        // A long text as the name of many functions.
        let text = [
            b"\x80\x04X\xa0\x86\x01\x00".to_vec(),
            vec![b'a'; 100_000],
            b"q\x00h\x00h\x00\x93.".to_vec(),
        ];
        let error = read(&text.concat()).unwrap_err().to_string();
        assert!(error.contains("a name of more than"), "{error}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

        #[test]
        fn no_program_panics(
            bytes in prop::collection::vec(
                prop_oneof![
                    any::<u8>(),
                    prop::sample::select(b"N(tled}])asubqrhj02.RQ1\x85\x86\x87\x88\x93\x94\x81K".to_vec()),
                ],
                0..60,
            ),
        ) {
            let _ = read(&bytes);
        }
    }
}
