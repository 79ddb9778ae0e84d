// SPDX-License-Identifier: Apache-2.0
//! Which extended attributes a layer carries.

/// Attributes by which overlayfs (trusted, or user with `userxattr`) marks directories and files.
const OVERLAY: [&[u8]; 2] = [b"trusted.overlay.", b"user.overlay."];
/// Marks of an overlay inside a sandbox, as an outer overlay stores them (`overlay.overlay.` is
/// escaped; kernel documentation of overlayfs, "Nesting overlayfs mounts").
const NESTED: &[u8] = b"trusted.overlay.overlay.";
/// Access rights beyond the mode, and capabilities of programs.
const KEPT: [&[u8]; 3] = [
    b"security.capability",
    b"system.posix_acl_access",
    b"system.posix_acl_default",
];

/// The mark of a directory that hides everything below it.
pub const OPAQUE: &str = "trusted.overlay.opaque";

/// Whether an attribute of an archive is set on its file. Marks of overlayfs are not: a layer that
/// could set them would show or hide what it does not hold. Labels of a security module are the
/// host's concern.
pub fn is_taken(name: &[u8]) -> bool {
    if OVERLAY.iter().any(|prefix| name.starts_with(prefix)) {
        return false;
    }
    KEPT.contains(&name) || name.starts_with(b"user.") || name.starts_with(b"trusted.")
}

/// What an attribute of an overlay's upper directory means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Upper {
    /// It belongs to the file.
    Kept,
    /// The directory hides what is below (if the value is `y`).
    Opaque,
    /// Overlayfs notes something for itself.
    Dropped,
    /// The content is elsewhere: the directory cannot be taken by itself.
    Refused,
}

/// Sorts an attribute of an upper directory.
pub fn of_upper(name: &[u8]) -> Upper {
    match name {
        b"trusted.overlay.opaque" => Upper::Opaque,
        b"trusted.overlay.redirect" | b"trusted.overlay.metacopy" | b"trusted.overlay.whiteout" => {
            Upper::Refused
        }
        _ if name.starts_with(NESTED) => Upper::Kept,
        _ if name.starts_with(OVERLAY[0]) => Upper::Dropped,
        _ if is_taken(name) || name.starts_with(OVERLAY[1]) => Upper::Kept,
        _ => Upper::Dropped,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_of_overlayfs_are_not_taken_from_archives() {
        for name in ["security.capability", "user.note", "trusted.note"] {
            assert!(is_taken(name.as_bytes()), "{name}");
        }
        let marks = [
            "trusted.overlay.opaque",
            "user.overlay.opaque",
            "trusted.overlay.overlay.x",
        ];
        for name in marks
            .into_iter()
            .chain(["security.selinux", "system.nfs4_acl"])
        {
            assert!(!is_taken(name.as_bytes()), "{name}");
        }
    }

    #[test]
    fn marks_in_upper_directories() {
        let cases = [
            ("trusted.overlay.opaque", Upper::Opaque),
            ("trusted.overlay.origin", Upper::Dropped),
            ("trusted.overlay.impure", Upper::Dropped),
            ("trusted.overlay.redirect", Upper::Refused),
            ("trusted.overlay.metacopy", Upper::Refused),
            ("trusted.overlay.overlay.opaque", Upper::Kept),
            ("security.capability", Upper::Kept),
            ("security.selinux", Upper::Dropped),
            ("user.overlay.opaque", Upper::Kept),
        ];
        for (name, meaning) in cases {
            assert_eq!(of_upper(name.as_bytes()), meaning, "{name}");
        }
    }
}
