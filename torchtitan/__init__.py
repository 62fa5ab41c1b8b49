from torchtitan.root import INSIDE

if INSIDE.is_dir():
    from torchtitan.installed import refuse_other_torchtitan

    refuse_other_torchtitan()
