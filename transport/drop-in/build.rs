//! Gives each exported symbol its version.
//!
//! `symbols.txt` has a line for every symbol that the libraries of rdma-core export:
//! `name@@VERSION`, or `name@VERSION` for one that only old programs use, and then, for a function
//! that is not provided, what it returns: `errno` (a positive error number), `null`, or `socket` (-1,
//! with the error number in `errno`).
//!
//! Rust cannot give a function a symbol version. So each symbol is a jump in assembler to the
//! function, and a version script, the second beside the one that rustc writes, names the versions.
//! Two scripts are something that lld takes (rustc's default on x86-64), and GNU ld does not.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=symbols.txt");
    println!("cargo::rerun-if-changed=build.rs");
    let table = fs::read_to_string("symbols.txt").expect("symbols.txt is beside build.rs");
    let out = env::var_os("OUT_DIR").expect("Cargo sets it");
    let jump = match env::var("CARGO_CFG_TARGET_ARCH").as_deref() {
        Ok("x86_64") => "jmp",
        Ok("aarch64") => "b",
        other => panic!("no jump instruction is known for {other:?}"),
    };
    let (mut code, mut operands) = (String::new(), BTreeSet::new());
    let mut versions = BTreeSet::new();
    let lines = table.lines().map(str::trim);
    for (number, line) in lines
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
        .enumerate()
    {
        let (symbol, absent) = line
            .split_once(' ')
            .map_or((line, None), |(s, a)| (s, Some(a)));
        let (name, version) = symbol.split_once('@').expect("a line is name@VERSION");
        let is_default = version.starts_with('@');
        let version = version.trim_start_matches('@');
        versions.insert(version.to_owned());
        let function = match absent {
            None => name.to_owned(),
            Some(kind @ ("errno" | "null" | "socket")) => format!("absent_{kind}"),
            Some(other) => panic!("symbols.txt: unknown kind {other} of {name}"),
        };
        let at = if is_default { "@@@" } else { "@" };
        let label = format!("riser_export_{number}");
        writeln!(
            code,
            r#"".globl {label}", ".type {label},@function", "{label}: {jump} {{{function}}}",
               ".size {label}, . - {label}", ".symver {label}, {name}{at}{version}","#
        )
        .expect("a string takes all text");
        operands.insert(function);
    }
    for function in &operands {
        writeln!(code, "{function} = sym {function},").expect("a string takes all text");
    }
    let out = Path::new(&out);
    let exports = format!("core::arch::global_asm!(\".text\",\n{code});\n");
    fs::write(out.join("exports.rs"), exports).expect("OUT_DIR is writable");

    // The jumps have their versions themselves, so the script names none of them.
    let script: String = versions.iter().map(|v| format!("{v} {{ }};\n")).collect();
    let path = out.join("versions.map");
    fs::write(&path, script).expect("OUT_DIR is writable");
    println!(
        "cargo::rustc-cdylib-link-arg=-Wl,--version-script={}",
        path.display()
    );
}
