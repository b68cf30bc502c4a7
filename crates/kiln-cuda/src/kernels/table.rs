//! One launch over many tensors: an optimizer's update of all parameters.
//!
//! The tensors of one parameter (itself, its gradient, its moments) are a row of a table in the device's
//! memory: first the number of elements, then one address an operand. Each block takes a chunk of one row;
//! which chunk of which row is a second table, so that a thousand small parameters keep the device as busy as
//! one large one.
//!
//! ```text
//! table    [count, parameter, gradient, moment, ..]  [count, parameter, ..]  ..
//! chunks   [row 0, chunk 0]  [row 0, chunk 1]  [row 1, chunk 0]  ..              one a block
//! ```

use std::fmt::Write;
use std::sync::Arc;

use super::{PRELUDE, cuda_type};
use crate::build::Source;
use crate::error::Result;
use crate::products::Number;
use crate::runtime::{Arguments, Kernel, Launch, Storage, Stream};

/// Elements of a chunk: eight accesses a thread.
const CHUNK: usize = 16 << 10;
/// Threads of a block.
const THREADS: u32 = 512;

/// What an update does with an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TableAccess {
    /// Read only.
    Read,
    /// Written only.
    Write,
    /// Read, then written.
    Update,
}

/// An operand of an update.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TableOperand {
    /// Type of the elements: f32, f16 or bf16.
    pub number: Number,
    /// What is done with it.
    pub access: TableAccess,
}

/// An elementwise update of many tensors.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TableUpdate {
    /// Name of the kernel.
    pub name: String,
    /// The operands; the elements of operand `i` are `x0`, `x1`, .. in the body, in f32.
    pub operands: Vec<TableOperand>,
    /// CUDA C++ statements that compute the elements to write. `s` points to the scalars, in f32.
    pub body: String,
}

impl TableUpdate {
    /// The kernel's source.
    ///
    /// # Panics
    /// For operands of f64, which this kernel would round.
    pub fn source(&self) -> Source {
        let narrow = self.operands.iter().any(|operand| operand.number.bytes() == 2);
        // As many elements at a time as 16 bytes have of the narrowest type.
        let width = if narrow { 8 } else { 4 };
        let (mut pointers, mut loads, mut stores) = (String::new(), String::new(), String::new());
        let (mut widen, mut keep, mut one, mut back) =
            (String::new(), String::new(), String::new(), String::new());
        for (i, operand) in self.operands.iter().enumerate() {
            let kind = cuda_type(operand.number);
            let _ = writeln!(pointers, "    {kind}* p{i} = ({kind}*)row[{}];", i + 1);
            let _ = writeln!(loads, "            kiln_vector<{kind}, {width}> v{i};");
            if operand.access == TableAccess::Write {
                let _ = writeln!(widen, "                float x{i};");
                let _ = writeln!(one, "                float x{i};");
            } else {
                let _ = writeln!(loads, "            v{i}.load(p{i} + i);");
                let _ = writeln!(widen, "                float x{i} = kiln_widen(v{i}.at[j]);");
                let _ = writeln!(one, "                float x{i} = kiln_widen(p{i}[k]);");
            }
            if operand.access != TableAccess::Read {
                let _ = writeln!(keep, "                v{i}.at[j] = kiln_narrow<{kind}>(x{i});");
                let _ = writeln!(back, "                p{i}[k] = kiln_narrow<{kind}>(x{i});");
                let _ = writeln!(stores, "            v{i}.store(p{i} + i);");
            }
        }
        let Self { name, operands, body } = self;
        let words = operands.len() + 1;
        let step = THREADS as usize * width;
        let text = format!(
            "{PRELUDE}
extern \"C\" __global__ void __launch_bounds__({THREADS})
{name}(const kiln_u64* rows, const uint2* chunks, const float* s)
{{
    const uint2 chunk = chunks[blockIdx.x];
    const kiln_u64* row = rows + (kiln_u64)chunk.x * {words};
    const kiln_u64 start = (kiln_u64)chunk.y * {CHUNK};
    const kiln_u64 end = start + {CHUNK} < row[0] ? start + {CHUNK} : row[0];
{pointers}    for (kiln_u64 i = start + threadIdx.x * {width}; i < end; i += {step}) {{
        if (i + {width} <= end) {{
{loads}            #pragma unroll
            for (int j = 0; j < {width}; j++) {{
{widen}                {body}
{keep}            }}
{stores}        }} else {{
            for (kiln_u64 k = i; k < end; k++) {{
{one}                {body}
{back}            }}
        }}
    }}
}}
"
        );
        Source {
            name: name.clone(),
            text,
        }
    }

    /// A launch of the update on `rows`, each with its number of elements and one storage an operand, from
    /// its first byte on. The tables are written to the device, which waits for `stream`.
    ///
    /// # Errors
    /// [`crate::CudaError::Range`] if a storage is smaller than its elements,
    /// [`crate::CudaError::OutOfMemory`], [`crate::CudaError::Driver`], [`crate::CudaError::Lost`].
    ///
    /// # Panics
    /// If a row has not one storage an operand: the program's own mistake.
    pub fn launch(
        &self,
        stream: &Stream,
        kernel: &Kernel,
        rows: &[(usize, Vec<Arc<Storage>>)],
        scalars: &Arc<Storage>,
    ) -> Result<Launch> {
        let (mut table, mut chunks) = (Vec::<u8>::new(), Vec::<u8>::new());
        let mut arguments = Arguments::new();
        for (index, (count, storages)) in rows.iter().enumerate() {
            assert_eq!(storages.len(), self.operands.len(), "one storage an operand");
            table.extend((*count as u64).to_ne_bytes());
            for (operand, storage) in self.operands.iter().zip(storages) {
                let address =
                    storage.part(&(0..count * operand.number.bytes()), "an update of many tensors")?;
                table.extend(address.to_ne_bytes());
                arguments = arguments.reaching(storage);
            }
            for chunk in 0..count.div_ceil(CHUNK) {
                chunks.extend(
                    [index as u32, chunk as u32]
                        .iter()
                        .flat_map(|word| word.to_ne_bytes()),
                );
            }
        }
        let upload = |bytes: &[u8]| -> Result<Arc<Storage>> {
            let storage = Arc::new(Storage::allocate(stream, bytes.len())?);
            stream.write(bytes, &storage, 0)?;
            Ok(storage)
        };
        let blocks = u32::try_from(chunks.len() / 8).unwrap_or(u32::MAX);
        let (table, chunks) = (upload(&table)?, upload(&chunks)?);
        Ok(Launch {
            kernel: kernel.clone(),
            grid: [blocks, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            arguments: arguments.memory(&table, 0).memory(&chunks, 0).memory(scalars, 0),
        })
    }
}
