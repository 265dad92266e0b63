from sgl_jax.tools.make_tiny_model.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
