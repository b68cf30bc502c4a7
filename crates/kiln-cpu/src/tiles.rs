//! Leave to use the tiles of AMX.
//!
//! Tiles are 8 KiB of registers, which the operating system saves for each thread. Linux lets a process use
//! them only after the process asked, once for all its threads; an instruction without leave ends the
//! process. So the compiler's flags alone do not decide that tiles are used ([`crate::Toolchain`]).

/// Whether this process may use tiles from now on. Asks the operating system.
pub(crate) fn permitted() -> bool {
    request()
}

/// `ARCH_REQ_XCOMP_PERM` for `XFEATURE_XTILEDATA` (arch/x86/include/uapi/asm/prctl.h of Linux).
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn request() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and touches no memory of the process. A system that does not know it
    // answers with an error.
    let answer = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
    answer == 0
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
fn request() -> bool {
    false
}
