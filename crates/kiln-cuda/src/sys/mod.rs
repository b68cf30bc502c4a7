//! The functions of NVIDIA's libraries that Kiln calls, each library as one table of function pointers.
//!
//! A table is filled from a library that was opened at run time, so a binary that contains this crate links
//! none of them and starts on a machine that has none. A table is also what a test replaces: `testing` fills
//! the driver's with functions that keep the calls.
//!
//! The declarations are written by hand after NVIDIA's documentation and hold only the functions that Kiln
//! calls. Sizes of structures that cross the border are asserted where they are declared.

pub mod cublaslt;
pub mod cudnn;
pub mod driver;
pub mod nvjpeg;
pub mod nvrtc;

/// Declares a table of functions of one library and how it is filled.
macro_rules! functions {
    (
        $(#[$meta:meta])*
        $table:ident
        $( fn $name:ident($($argument:ident: $kind:ty),* $(,)?) -> $result:ty; )*
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        #[allow(non_snake_case, missing_docs, reason = "names and documentation are the library's")]
        pub struct $table {
            $( pub $name: unsafe extern "C" fn($($argument: $kind),*) -> $result, )*
        }

        impl std::fmt::Debug for $table {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($table))
            }
        }

        impl $table {
            /// Looks every function up.
            ///
            /// # Errors
            /// The name of the first function that the library has not.
            ///
            /// # Safety
            /// `library` must be the library whose functions these are, and must stay open while the table is
            /// used.
            pub unsafe fn load(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $(
                        // SAFETY: the caller promises the library; the signature is that of its
                        // documentation.
                        $name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                            .map_err(|_| stringify!($name))?,
                    )*
                })
            }
        }
    };
}

/// Declares handles: pointers that only the library looks into.
macro_rules! handles {
    ($( $(#[$meta:meta])* $name:ident; )*) => {
        $(
            $(#[$meta])*
            #[repr(transparent)]
            #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
            pub struct $name(pub *mut std::ffi::c_void);

            impl $name {
                /// No object.
                pub const NULL: Self = Self(std::ptr::null_mut());
            }

            // SAFETY: a handle is a name. The libraries allow calls with one handle from any thread; the
            // owner of the handle prevents calls that must not happen at the same time.
            unsafe impl Send for $name {}
            // SAFETY: as above.
            unsafe impl Sync for $name {}
        )*
    };
}

pub(crate) use {functions, handles};
