//! Shell completion scripts.

use clap_complete::Shell;

/// Completes object paths in bash. Readline only replaces the text after the last colon.
const BASH: &str = r#"
_riserd_objects() {
    local line="${COMP_LINE:0:COMP_POINT}"
    local word="${line##*[[:space:]]}"
    case " ${COMP_WORDS[*]} " in
        *" ls "*|*" get "*|*" info "*|*" set "*|*" create "*|*" delete "*)
            if [[ $word == /* ]]; then
                mapfile -t COMPREPLY < <(command riserd complete "$word" 2>/dev/null)
                if [[ $word == *:* && $COMP_WORDBREAKS == *:* ]]; then
                    COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*:}"}"}")
                fi
                if [[ ${COMPREPLY[0]} == */ ]]; then
                    compopt -o nospace 2>/dev/null
                fi
                return
            fi
            ;;
    esac
    _riserd "$@"
}

complete -F _riserd_objects -o bashdefault -o default riserd
"#;

/// The same for fish.
const FISH: &str = "
complete -c riserd -n '__fish_seen_subcommand_from ls get info set create delete' -f \
-a '(command riserd complete (commandline -ct) 2>/dev/null)'
";

/// Returns the completion script for a shell.
pub(super) fn script(shell: Shell, command: &mut clap::Command) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, command, "riserd", &mut script);
    match shell {
        Shell::Bash => script.extend_from_slice(BASH.as_bytes()),
        Shell::Fish => script.extend_from_slice(FISH.as_bytes()),
        _ => {}
    }
    script
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    use clap::CommandFactory;

    use super::super::Cli;
    use super::*;

    #[test]
    fn bash_completes_object_paths() {
        let dir = std::env::temp_dir().join(format!("riserd-complete-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let program = dir.join("riserd");
        // Prints two objects below the path.
        fs::write(&program, "#!/bin/sh\necho \"${2}0/\"\necho \"${2}1\"\n").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let file = dir.join("script");
        fs::write(&file, script(Shell::Bash, &mut Cli::command())).unwrap();
        let complete = |line: &str| {
            let test = "source \"$1\"; COMP_LINE=$2 COMP_POINT=${#2} COMP_WORDS=($2); \
                        COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); \
                        _riserd_objects riserd \"${COMP_WORDS[-1]}\" \"${COMP_WORDS[-2]}\"; \
                        echo \"${COMPREPLY[*]}\"";
            let path = format!("{}:{}", dir.display(), std::env::var("PATH").unwrap());
            let mut bash = Command::new("bash");
            bash.args(["--norc", "-c", test, "bash"]).arg(&file);
            let output = bash.arg(line).env("PATH", path).output().unwrap();
            assert!(output.status.success(), "{line}: {output:?}");
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        };
        assert_eq!(
            complete("riserd set /backends/disk"),
            "/backends/disk0/ /backends/disk1"
        );
        let portal = "riserd -o json info /targets/t/portals/iscsi:192.0.2.1";
        assert_eq!(complete(portal), "192.0.2.10/ 192.0.2.11");
        assert_eq!(complete("riserd stat"), "status");
        fs::remove_dir_all(&dir).unwrap();
    }
}
